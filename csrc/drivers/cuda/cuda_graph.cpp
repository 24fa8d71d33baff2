#include "drivers/cuda/cuda_graph.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "drivers/cuda/cuda_calls.h"

namespace backplane::cuda {
namespace {

void append(std::string& state, const void* data, size_t bytes) {
  state.append(static_cast<const char*>(data), bytes);
}

// Everything that an update of the command can change, as bytes.
std::string state_of(const CCommand& command) {
  std::string state;
  append(state, &command.kernel, sizeof command.kernel);
  append(state, command.items, sizeof command.items);
  append(state, command.group, sizeof command.group);
  for (uint64_t i = 0; i < command.argument_count; ++i) {
    const CArgument& one = command.arguments[i];
    append(
        state, one.bytes == 0 ? static_cast<const void*>(&one.memory) : one.data,
        one.bytes == 0 ? sizeof(void*) : one.bytes);
  }
  for (const uint64_t number :
       {address_of(command.to), address_of(command.from), command.bytes, static_cast<uint64_t>(command.value)}) {
    append(state, &number, sizeof number);
  }
  if (command.kind == CCommand::Captured) {
    append(state, &command.argument, sizeof command.argument);
  }
  return state;
}

struct Node {
  void* handle = nullptr;
  uint64_t kind = 0;
  std::string state;
  HostCall call{}; // of a host callback
};

struct Graph {
  void* graph = nullptr;
  void* executable = nullptr;
  void* context = nullptr;
  std::vector<Node> nodes; // does not change its size, as CUDA refers to `call`

  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    if (graph != nullptr) {
      static_cast<void>(api.cuGraphDestroy(graph));
    }
  }
};

int params_of(const CCommand& command, c10::ArrayRef<void*> values, KernelNodeParams& params) {
  params = {};
  params.function = command.kernel;
  params.arguments = const_cast<void**>(values.data());
  return blocks_of(command.items, command.group, params.grid, params.block);
}

CopySide side(void* memory, uint64_t bytes) {
  CopySide made{};
  made.memory_type = kDeviceMemory;
  made.device = address_of(memory);
  made.pitch = bytes;
  made.height = 1;
  return made;
}

CopyNodeParams copy_of(const CCommand& command) {
  return {side(command.from, command.bytes), side(command.to, command.bytes), command.bytes, 1, 1};
}

FillNodeParams fill_of(const CCommand& command) {
  const auto value = static_cast<unsigned char>(command.value);
  return {address_of(command.to), command.bytes, value, 1, command.bytes, 1};
}

int add_node(Graph& graph, const CCommand& command, Node& node) {
  c10::SmallVector<void*, 16> after;
  for (uint64_t i = 0; i < command.after_count; ++i) {
    after.push_back(graph.nodes[command.after[i]].handle);
  }
  switch (command.kind) {
    case CCommand::Launch: {
      const auto values = values_of(command.arguments, command.argument_count);
      KernelNodeParams params;
      const int status = params_of(command, values, params);
      return status != 0 ? status
                         : api.cuGraphAddKernelNode_v2(&node.handle, graph.graph, after.data(), after.size(), &params);
    }
    case CCommand::Copy: {
      const CopyNodeParams params = copy_of(command);
      return api.cuGraphAddMemcpyNode(&node.handle, graph.graph, after.data(), after.size(), &params, graph.context);
    }
    case CCommand::Fill: {
      const FillNodeParams params = fill_of(command);
      return api.cuGraphAddMemsetNode(&node.handle, graph.graph, after.data(), after.size(), &params, graph.context);
    }
    case CCommand::HostCallback: {
      node.call = {command.function, command.argument};
      const HostNodeParams params{&call_host_function, &node.call};
      return api.cuGraphAddHostNode(&node.handle, graph.graph, after.data(), after.size(), &params);
    }
    case CCommand::Captured:
      return api.cuGraphAddChildGraphNode(&node.handle, graph.graph, after.data(), after.size(), command.argument);
    default:
      return kNotSupported;
  }
}

int update_node(const Graph& graph, const CCommand& command, const Node& node) {
  switch (command.kind) {
    case CCommand::Launch: {
      const auto values = values_of(command.arguments, command.argument_count);
      KernelNodeParams params;
      const int status = params_of(command, values, params);
      return status != 0 ? status : api.cuGraphExecKernelNodeSetParams_v2(graph.executable, node.handle, &params);
    }
    case CCommand::Copy: {
      const CopyNodeParams params = copy_of(command);
      return api.cuGraphExecMemcpyNodeSetParams(graph.executable, node.handle, &params, graph.context);
    }
    case CCommand::Fill: {
      const FillNodeParams params = fill_of(command);
      return api.cuGraphExecMemsetNodeSetParams(graph.executable, node.handle, &params, graph.context);
    }
    case CCommand::Captured:
      return api.cuGraphExecChildGraphNodeSetParams(graph.executable, node.handle, command.argument);
    default:
      return kNotSupported;
  }
}

} // namespace

int graph_create(const CCommand* commands, uint64_t count, void** graph) {
  auto made = std::make_unique<Graph>();
  made->nodes.resize(count);
  int status = api.cuCtxGetCurrent(&made->context);
  if (status == 0) {
    status = api.cuGraphCreate(&made->graph, 0);
  }
  for (uint64_t i = 0; i < count && status == 0; ++i) {
    Node& node = made->nodes[i];
    node.kind = commands[i].kind;
    node.state = state_of(commands[i]);
    status = add_node(*made, commands[i], node);
  }
  if (status == 0) {
    status = api.cuGraphInstantiateWithFlags(&made->executable, made->graph, 0);
  }
  if (status == 0) {
    *graph = made.release();
  }
  return status;
}

int graph_update(void* graph, const CCommand* commands, uint64_t count, int* updated) {
  auto& made = *static_cast<Graph*>(graph);
  *updated = 0;
  if (count != made.nodes.size()) {
    return 0;
  }
  for (uint64_t i = 0; i < count; ++i) {
    Node& node = made.nodes[i];
    if (commands[i].kind != node.kind) {
      return 0;
    }
    std::string state = state_of(commands[i]);
    if (state == node.state) {
      continue;
    }
    const int status = update_node(made, commands[i], node);
    if (status == kGraphUpdateFailure || status == kNotSupported || status == kInvalidValue) {
      return 0; // the runtime makes a new graph, which reports other errors
    }
    if (status != 0) {
      return status;
    }
    node.state = std::move(state);
  }
  *updated = 1;
  return 0;
}

int graph_launch(void* graph, void* queue) {
  return api.cuGraphLaunch(static_cast<Graph*>(graph)->executable, queue);
}

int graph_destroy(void* graph) {
  const std::unique_ptr<Graph> made(static_cast<Graph*>(graph));
  int status = api.cuGraphExecDestroy(made->executable);
  const auto calls_host = [](const Node& node) { return node.kind == CCommand::HostCallback; };
  if (status == 0 && std::any_of(made->nodes.begin(), made->nodes.end(), calls_host)) {
    status = api.cuCtxSynchronize(); // pending launches call Node::call
  }
  return status;
}

// A stream for each capture, so that threads can capture at the same time. What a library must not do in a capture is
// refused to this thread only.
int begin_capture(void** queue) {
  void* stream = nullptr;
  if (const int status = api.cuStreamCreate(&stream, kNonBlocking)) {
    return status;
  }
  const int status = api.cuStreamBeginCapture_v2(stream, kCaptureOfThread);
  if (status != 0) {
    static_cast<void>(api.cuStreamDestroy_v2(stream));
    return status;
  }
  *queue = stream;
  return 0;
}

int end_capture(void* queue, void** captured) {
  const int status = api.cuStreamEndCapture(queue, captured);
  const int destroyed = api.cuStreamDestroy_v2(queue);
  return status != 0 ? status : destroyed;
}

int destroy_captured(void* captured) {
  return api.cuGraphDestroy(captured);
}

} // namespace backplane::cuda
