// Instantiated graphs: updates and launches.

#include <algorithm>
#include <map>

#include "capture.h"
#include "copies.h"
#include "entry.h"
#include "graph.h"
#include "graph_nodes.h"
#include "launch.h"

struct ExecNode {
  const Node* original; // only compared
  std::shared_ptr<Operation> operation;
  std::vector<size_t> dependencies; // indices
  bool is_enabled = true;
};

struct GraphExec {
  std::mutex mutex; // protects the following
  std::vector<ExecNode> nodes; // in an order in which they can be executed
  std::vector<std::shared_ptr<UserObject>> objects; // those of child graphs are theirs
  unsigned long long flags = 0;
  std::shared_ptr<Completion> last; // launch
};

namespace {

bool is_about_events(const Operation& one) {
  return one.node_type() == 6 || one.node_type() == 7;
}

// A launch: the operations that the graph has now, one after another.
struct GraphLaunch : Operation {
  explicit GraphLaunch(std::shared_ptr<GraphExec> given) : exec(std::move(given)) {
    for (const ExecNode& one : exec->nodes) {
      if (one.is_enabled) {
        // A recording and a wait belong to one launch.
        const bool is_own = is_about_events(*one.operation);
        steps.push_back({is_own ? one.operation->clone() : one.operation, {}, nullptr});
      }
    }
  }
  ~GraphLaunch() override {
    for (const Step& one : steps) {
      if (one.done != nullptr && !one.done->is_done()) {
        one.done->finish();
      }
    }
  }

  Completions waits_for() override {
    std::lock_guard lock(exec->mutex);
    return exec->last == nullptr ? Completions{} : Completions{exec->last};
  }

  void submitted(const std::shared_ptr<Completion>& done) override {
    for (Step& one : steps) {
      one.after = one.operation->waits_for();
      if (one.operation->node_type() == 7) {
        one.done = std::make_shared<Completion>();
        one.operation->submitted(one.done);
      }
    }
    std::lock_guard lock(exec->mutex);
    exec->last = done;
  }

  CUresult execute(Context& context) override {
    for (const Step& one : steps) {
      for (const auto& earlier : one.after) {
        earlier->wait();
      }
      RETURN_ERROR(one.operation->execute(context));
      if (one.done != nullptr) {
        one.done->finish();
      }
    }
    return CUDA_SUCCESS;
  }

  int node_type() const override {
    return 4;
  }
  std::shared_ptr<Operation> clone() const override {
    return std::make_shared<GraphLaunch>(exec);
  }

  struct Step {
    std::shared_ptr<Operation> operation;
    Completions after;
    std::shared_ptr<Completion> done; // of a recording
  };
  std::shared_ptr<GraphExec> exec;
  std::vector<Step> steps;
};

// Stores the first node of a cycle in `wrong`.
CUresult instantiate(Graph& graph, GraphExec* exec, CUgraphNode* wrong) {
  std::lock_guard lock(graph.mutex);
  exec->objects = graph.objects;
  std::map<const Node*, size_t> indices;
  for (Node* node : in_order(graph)) {
    ExecNode made{node, node->operation->clone(), {}, true};
    for (const Node* dependency : node->dependencies) {
      made.dependencies.push_back(indices[dependency]);
    }
    indices[node] = exec->nodes.size();
    exec->nodes.push_back(std::move(made));
  }
  for (const auto& node : graph.nodes) {
    if (indices.count(node.get()) == 0) {
      *wrong = node.get();
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

constexpr unsigned long long kFlags = 15;

CUresult instantiate(CUgraphExec* made, CUgraph handle, unsigned long long flags, CUgraphNode* wrong) {
  const auto graph = find(handle);
  REQUIRE(made != nullptr && graph != nullptr && (flags & ~kFlags) == 0, CUDA_ERROR_INVALID_VALUE);
  auto exec = std::make_shared<GraphExec>();
  exec->flags = flags;
  RETURN_ERROR(instantiate(*graph, exec.get(), wrong));
  *made = Registry<GraphExec>::all().add(exec);
  return CUDA_SUCCESS;
}

ExecNode* node_of(GraphExec& exec, const Node* original) {
  const auto at =
      std::find_if(exec.nodes.begin(), exec.nodes.end(), [&](const ExecNode& one) { return one.original == original; });
  return at == exec.nodes.end() ? nullptr : &*at;
}

template <class T, class Parameters>
CUresult set(CUgraphExec handle, CUgraphNode node, const Parameters* given) {
  const auto exec = find(handle);
  REQUIRE(exec != nullptr && given != nullptr, CUDA_ERROR_INVALID_VALUE);
  std::shared_ptr<Operation> operation;
  RETURN_ERROR(make_operation(*given, &operation));
  std::lock_guard lock(exec->mutex);
  ExecNode* at = node_of(*exec, node);
  REQUIRE(at != nullptr && dynamic_cast<T*>(at->operation.get()) != nullptr, CUDA_ERROR_INVALID_VALUE);
  at->operation = operation;
  return CUDA_SUCCESS;
}

enum Update { kSuccess = 0, kTopologyChanged = 2, kNodeTypeChanged = 3 };

// Compares an updated graph with an instantiated one. Stores the nodes that differ.
Update compare(const std::vector<ExecNode>& now, const std::vector<ExecNode>& next, CUgraphExecUpdateResultInfo* info) {
  if (now.size() != next.size()) {
    return kTopologyChanged;
  }
  for (size_t i = 0; i < now.size(); ++i) {
    info->errorNode = const_cast<Node*>(next[i].original);
    info->errorFromNode = nullptr;
    if (now[i].dependencies != next[i].dependencies) {
      return kTopologyChanged;
    }
    if (now[i].operation->node_type() != next[i].operation->node_type()) {
      return kNodeTypeChanged;
    }
  }
  info->errorNode = nullptr;
  return kSuccess;
}

} // namespace

// Declares `exec`, of the parameter `handle`.
#define ENTER_EXEC()              \
  ENTER_UNLESS_FAILED();          \
  const auto exec = find(handle); \
  REQUIRE(exec != nullptr, CUDA_ERROR_INVALID_VALUE)

API cuGraphInstantiateWithFlags(CUgraphExec* made, CUgraph graph, unsigned long long flags) {
  ENTER_CONTEXT();
  CUgraphNode wrong = nullptr;
  return instantiate(made, graph, flags, &wrong);
}

API cuGraphInstantiateWithParams(CUgraphExec* made, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) {
  ENTER_CONTEXT();
  REQUIRE(parameters != nullptr, CUDA_ERROR_INVALID_VALUE);
  parameters->hErrNode_out = nullptr;
  const CUresult error = instantiate(made, graph, parameters->flags, &parameters->hErrNode_out);
  parameters->result_out = error == CUDA_SUCCESS ? 0 : 1;
  return error;
}

API cuGraphExecDestroy(CUgraphExec handle) {
  ENTER_UNLESS_FAILED();
  return Registry<GraphExec>::all().remove(handle) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API cuGraphExecGetFlags(CUgraphExec handle, unsigned long long* flags) {
  ENTER_EXEC();
  REQUIRE(flags != nullptr, CUDA_ERROR_INVALID_VALUE);
  *flags = exec->flags;
  return CUDA_SUCCESS;
}

API cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* given) {
  ENTER_UNLESS_FAILED();
  return set<KernelLaunch>(exec, node, given);
}

API cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D* given, CUcontext context) {
  ENTER_UNLESS_FAILED();
  REQUIRE(find(context) != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  return set<Copy>(exec, node, given);
}

API cuGraphExecMemsetNodeSetParams(
    CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* given, CUcontext context) {
  ENTER_UNLESS_FAILED();
  REQUIRE(find(context) != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  return set<Fill>(exec, node, given);
}

API cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS* given) {
  ENTER_UNLESS_FAILED();
  return set<HostFunction>(exec, node, given);
}

API cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
  ENTER_UNLESS_FAILED();
  const Recorded given{event};
  return set<EventRecord>(exec, node, &given);
}

API cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
  ENTER_UNLESS_FAILED();
  const Awaited given{event};
  return set<EventWait>(exec, node, &given);
}

API cuGraphExecChildGraphNodeSetParams(CUgraphExec handle, CUgraphNode node, CUgraph child) {
  ENTER_EXEC();
  const auto graph = find(child);
  std::shared_ptr<ChildGraph> now;
  {
    std::lock_guard lock(exec->mutex);
    const ExecNode* at = node_of(*exec, node);
    now = at == nullptr ? nullptr : std::dynamic_pointer_cast<ChildGraph>(at->operation);
  }
  REQUIRE(graph != nullptr && now != nullptr, CUDA_ERROR_INVALID_VALUE);
  GraphExec before, after;
  CUgraphExecUpdateResultInfo info;
  RETURN_ERROR(instantiate(*now->graph, &before, &info.errorNode));
  RETURN_ERROR(instantiate(*graph, &after, &info.errorNode));
  REQUIRE(compare(before.nodes, after.nodes, &info) == kSuccess, CUDA_ERROR_INVALID_VALUE);
  const Child given{child};
  return set<ChildGraph>(handle, node, &given);
}

API cuGraphNodeSetEnabled(CUgraphExec handle, CUgraphNode node, unsigned enabled) {
  ENTER_EXEC();
  std::lock_guard lock(exec->mutex);
  ExecNode* at = node_of(*exec, node);
  // Kernels, copies and fills.
  REQUIRE(at != nullptr && at->operation->node_type() <= 2 && enabled <= 1, CUDA_ERROR_INVALID_VALUE);
  at->is_enabled = enabled != 0;
  return CUDA_SUCCESS;
}

API cuGraphNodeGetEnabled(CUgraphExec handle, CUgraphNode node, unsigned* enabled) {
  ENTER_EXEC();
  std::lock_guard lock(exec->mutex);
  const ExecNode* at = node_of(*exec, node);
  REQUIRE(at != nullptr && enabled != nullptr, CUDA_ERROR_INVALID_VALUE);
  *enabled = at->is_enabled;
  return CUDA_SUCCESS;
}

API cuGraphExecUpdate_v2(CUgraphExec handle, CUgraph with, CUgraphExecUpdateResultInfo* info) {
  ENTER_EXEC();
  const auto graph = find(with);
  REQUIRE(graph != nullptr && info != nullptr, CUDA_ERROR_INVALID_VALUE);
  GraphExec next;
  RETURN_ERROR(instantiate(*graph, &next, &info->errorNode));
  std::lock_guard lock(exec->mutex);
  info->result = compare(exec->nodes, next.nodes, info);
  REQUIRE(info->result == kSuccess, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  for (size_t i = 0; i < next.nodes.size(); ++i) {
    exec->nodes[i].operation = next.nodes[i].operation;
  }
  exec->objects = next.objects;
  return CUDA_SUCCESS;
}

API cuGraphUpload(CUgraphExec handle, CUstream on) {
  ENTER_CONTEXT();
  REQUIRE(find(handle) != nullptr, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(stream_of(context, on) != nullptr, CUDA_ERROR_INVALID_HANDLE);
  return CUDA_SUCCESS;
}

API cuGraphLaunch(CUgraphExec handle, CUstream on) {
  ENTER_CONTEXT();
  const auto exec = find(handle);
  REQUIRE(exec != nullptr, CUDA_ERROR_INVALID_VALUE);
  const auto stream = stream_of(context, on);
  REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE);
  std::shared_ptr<GraphLaunch> launch;
  {
    std::lock_guard lock(exec->mutex);
    launch = std::make_shared<GraphLaunch>(exec);
  }
  return submit(stream, launch);
}
