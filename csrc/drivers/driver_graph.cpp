#include "drivers/driver_graph.h"

#include <deque>
#include <mutex>
#include <vector>

#include "devices/compiled_kernel.h"
#include "drivers/driver_kernel.h"

namespace backplane {
namespace {

struct HostNode {
  std::shared_ptr<const HostFunction> function;
  std::vector<char*> memory;
  std::vector<uint64_t> numbers;

  static void call(void* given) {
    const InHostCallback here;
    const auto& node = *static_cast<const HostNode*>(given);
    node.function->run(node.memory.data(), node.numbers.data());
  }
};

bool overlap(const Copy& copy) {
  const auto* to = static_cast<const char*>(copy.destination);
  const auto* from = static_cast<const char*>(copy.source);
  return to < from + copy.bytes && from < to + copy.bytes;
}

// Commands in the representation of the graph functions, with the arrays that they point to.
class CCommands {
 public:
  CCommands(c10::ArrayRef<GraphCommand> commands, const DriverMemory& memory, std::deque<HostNode>& host_nodes)
      : memory_(memory), next_host_node_(host_nodes.begin()) {
    for (const GraphCommand& given : commands) {
      CCommand made{};
      after_.emplace_back(given.after.begin(), given.after.end());
      made.after = after_.back().data();
      made.after_count = after_.back().size();
      std::visit([&](const auto& one) { add(one, made); }, *given.command);
      commands_.push_back(made);
    }
  }

  const CCommand* data() const {
    return commands_.data();
  }
  uint64_t size() const {
    return commands_.size();
  }

 private:
  void add(const KernelLaunch& launch, CCommand& made) {
    made.kind = CCommand::Launch;
    made.kernel = static_cast<DriverKernel*>(launch.kernel->handle())->native_handle();
    std::copy(launch.spec.global_size.begin(), launch.spec.global_size.end(), made.items);
    std::copy(launch.spec.group_size.begin(), launch.spec.group_size.end(), made.group);
    c10::SmallVector<LaunchArgument, 24> resolved;
    for (const KernelArgument& argument : launch.arguments) {
      resolved.push_back(memory_.resolve(argument));
    }
    arguments_.push_back(c_arguments(resolved));
    made.arguments = arguments_.back().data();
    made.argument_count = arguments_.back().size();
  }

  void add(const Copy& copy, CCommand& made) {
    made.kind = CCommand::Copy;
    const LaunchArgument to = whole(copy.destination, copy.bytes), from = whole(copy.source, copy.bytes);
    made.to = to.memory;
    made.to_offset = to.offset;
    made.from = from.memory;
    made.from_offset = from.offset;
    made.bytes = copy.bytes;
  }

  void add(const Fill& fill, CCommand& made) {
    made.kind = CCommand::Fill;
    const LaunchArgument to = whole(fill.address, fill.bytes);
    made.to = to.memory;
    made.to_offset = to.offset;
    made.bytes = fill.bytes;
    made.value = fill.value;
  }

  void add(const HostCallback&, CCommand& made) {
    made.kind = CCommand::HostCallback;
    made.function = &HostNode::call;
    made.argument = &*next_host_node_++;
  }

  template <typename Other>
  void add(const Other&, CCommand&) {
    TORCH_INTERNAL_ASSERT(false, "native graphs do not support this command");
  }

  LaunchArgument whole(const void* address, size_t bytes) const {
    static_cast<void>(memory_.place_of(address, bytes)); // checks the range
    return memory_.resolve({address, 0});
  }

  const DriverMemory& memory_;
  std::deque<HostNode>::iterator next_host_node_;
  std::vector<CCommand> commands_;
  std::deque<c10::SmallVector<CArgument, 32>> arguments_;
  std::deque<std::vector<uint64_t>> after_;
};

class DriverGraph final : public NativeGraph {
 public:
  DriverGraph(
      c10::ArrayRef<GraphCommand> commands, DriverObject& driver, const DriverMemory& memory, DriverStreams& streams)
      : functions_(*driver.launcher()->graphs()), driver_(driver), memory_(memory), streams_(streams) {
    for (const GraphCommand& one : commands) {
      if (const auto* callback = std::get_if<HostCallback>(one.command)) {
        host_nodes_->push_back({callback->function, callback->memory.vec(), callback->numbers.vec()});
      }
    }
    try {
      create(commands);
    } catch (const NativeError& error) {
      driver_.errors().convert(error, driver_.object(), "creating a graph");
    }
  }

  ~DriverGraph() override {
    if (!Py_IsInitialized() || driver_.errors().is_lost()) {
      static_cast<void>(host_nodes_.release()); // a queue can still call them
      return;
    }
    if (!host_nodes_->empty()) {
      const DeviceCall gil(true);
      const pybind11::error_scope kept;
      streams_.finish_work(); // pending work can still call the nodes
    }
    static_cast<void>(functions_.destroy(graph_)); // a destructor cannot report an error
  }

  void launch(c10::ArrayRef<GraphCommand> commands, bool changed, StreamHandle handle) override {
    DriverStream& stream = streams_.known(handle);
    stream.deferred.issue_all();
    stream.throw_failure();
    streams_.natively(stream, Doing{"launching a graph"}, [&] {
      const GilReleased released; // a thread must not wait for the lock with the GIL
      const std::lock_guard<std::mutex> guard(lock_);
      if (changed || memory_.generation() != generation_) {
        update(commands);
      }
      check_status("graph_launch", functions_.launch(graph_, stream.native));
    });
  }

 private:
  void create(c10::ArrayRef<GraphCommand> commands) {
    const uint64_t generation = memory_.generation();
    const CCommands given(commands, memory_, *host_nodes_);
    void* graph = nullptr;
    check_status("graph_create", functions_.create(given.data(), given.size(), &graph));
    graph_ = graph;
    generation_ = generation;
  }

  void update(c10::ArrayRef<GraphCommand> commands) {
    const uint64_t generation = memory_.generation();
    int updated = 0;
    {
      const CCommands given(commands, memory_, *host_nodes_);
      check_status("graph_update", functions_.update(graph_, given.data(), given.size(), &updated));
    }
    if (updated != 0) {
      generation_ = generation;
      return;
    }
    void* const before = graph_;
    create(commands);
    check_status("graph_destroy", functions_.destroy(before));
  }

  const GraphFunctions& functions_; // of the launcher, which lives as long as the process
  DriverObject& driver_;
  const DriverMemory& memory_;
  DriverStreams& streams_;
  std::unique_ptr<std::deque<HostNode>> host_nodes_ = std::make_unique<std::deque<HostNode>>();
  std::mutex lock_;
  void* graph_ = nullptr;
  uint64_t generation_ = 0; // of the memory that the graph refers to
};

} // namespace

std::unique_ptr<NativeGraph> make_driver_graph(
    c10::ArrayRef<GraphCommand> commands, DriverObject& driver, const DriverMemory& memory, DriverStreams& streams) {
  const NativeLauncher* launcher = driver.launcher();
  if (launcher == nullptr || launcher->graphs() == nullptr || commands.empty()) {
    return nullptr;
  }
  for (const GraphCommand& one : commands) {
    const Command& command = *one.command;
    const auto* launch = std::get_if<KernelLaunch>(&command);
    const auto* copy = std::get_if<Copy>(&command);
    const bool takes = (launch != nullptr && !launch->spec.has_attributes()) || std::holds_alternative<Fill>(command) ||
        (copy != nullptr && copy->kind == CopyKind::WithinDevice && !overlap(*copy)) ||
        (std::holds_alternative<HostCallback>(command) && launcher->calls_host() && !launcher->host_sees_memory());
    if (!takes || is_empty(command)) {
      return nullptr;
    }
    if (launch != nullptr) {
      auto& kernel = *static_cast<DriverKernel*>(launch->kernel->handle());
      const GilReleased released;
      kernel.wait();
      if (!kernel.is_built()) {
        return nullptr; // the launch throws the build error
      }
    }
  }
  return std::make_unique<DriverGraph>(commands, driver, memory, streams);
}

} // namespace backplane
