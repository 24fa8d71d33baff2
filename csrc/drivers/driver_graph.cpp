#include "drivers/driver_graph.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "devices/compiled_kernel.h"
#include "devices/queue_function.h"
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

// The arguments of a launch or a library call in the representation of a C launcher.
c10::SmallVector<CArgument, 32> resolved(c10::ArrayRef<KernelArgument> arguments, const DriverMemory& memory) {
  c10::SmallVector<LaunchArgument, 24> found;
  for (const KernelArgument& argument : arguments) {
    found.push_back(memory.resolve(argument));
  }
  return c_arguments(found);
}

// Everything that a library function can read from its arguments, as bytes.
std::string bytes_of(c10::ArrayRef<CArgument> arguments) {
  std::string bytes;
  const auto append = [&bytes](const void* data, size_t count) { bytes.append(static_cast<const char*>(data), count); };
  for (const CArgument& one : arguments) {
    if (one.bytes == 0) {
      append(&one.memory, sizeof one.memory);
      append(&one.offset, sizeof one.offset);
    } else {
      append(one.data, one.bytes);
    }
  }
  return bytes;
}

// The library calls of a graph, which the driver has captured.
class CapturedCalls {
 public:
  CapturedCalls(DriverObject& driver, const DriverMemory& memory) : driver_(driver), memory_(memory) {}
  ~CapturedCalls() {
    discard_replaced();
    for (const Call& one : calls_) {
      destroy(one.captured);
    }
  }
  CapturedCalls(const CapturedCalls&) = delete;
  CapturedCalls& operator=(const CapturedCalls&) = delete;

  // Captures the library calls of `commands`: all of them at first, then those whose arguments have changed. Throws if
  // the library or the driver refuses one.
  void capture(c10::ArrayRef<GraphCommand> commands) {
    size_t next = 0;
    for (const GraphCommand& one : commands) {
      if (const auto* library_call = std::get_if<LibraryCall>(one.command)) {
        if (next == calls_.size()) {
          calls_.emplace_back();
        }
        capture(*library_call, calls_[next++]);
      }
    }
  }

  // The driver's object of the call `index`.
  void* of(size_t index) const {
    return calls_[index].captured;
  }

  // Destroys what later captures have replaced. Until then it exists, so that captures of a call have other addresses.
  void discard_replaced() {
    for (void* const one : std::exchange(replaced_, {})) {
      destroy(one);
    }
  }

  // Leaves the driver's objects to the end of the process.
  void abandon() noexcept {
    calls_.clear();
    replaced_.clear();
  }

 private:
  struct Call {
    std::string arguments;
    void* captured = nullptr;
  };

  void capture(const LibraryCall& library_call, Call& call) {
    const auto arguments = resolved(library_call.arguments, memory_);
    std::string bytes = bytes_of(arguments);
    if (call.captured != nullptr && bytes == call.arguments) {
      return;
    }
    void* const captured = captured_call(library_call, arguments);
    if (call.captured != nullptr) {
      replaced_.push_back(call.captured);
    }
    call = {std::move(bytes), captured};
  }

  void* captured_call(const LibraryCall& library_call, c10::ArrayRef<CArgument> arguments) const {
    const QueueFunction& function = *library_call.function;
    std::string doing = c10::str("capturing ", function.name(), " for ", *library_call.caller);
    const auto call = reinterpret_cast<int (*)(void*, const CArgument*, uint64_t)>(function.address());
    const GilReleased released; // a thread that executes deferred commands can hold a lock of the library
    void* queue = nullptr;
    if (const int status = functions_->begin(&queue)) {
      driver_.errors().convert(NativeError{"begin_capture", status, ""}, driver_.object(), doing);
    }
    const int status = call(queue, arguments.data(), arguments.size());
    void* captured = nullptr;
    const int ended = functions_->end(queue, &captured);
    if (status == 0 && ended == 0) {
      return captured;
    }
    destroy(captured);
    const std::string why = status != 0 ? function.explain(status) : "";
    if (ended == 0) {
      driver_.errors().fail(doing, function.name(), status, why);
    }
    if (status != 0) {
      doing += c10::str(", which answered ", status, why.empty() ? "" : " (" + why + ")");
    }
    driver_.errors().convert(NativeError{"end_capture", ended, ""}, driver_.object(), doing);
  }

  void destroy(void* captured) const {
    if (captured != nullptr) {
      static_cast<void>(functions_->destroy(captured)); // callers cannot report an error
    }
  }

  DriverObject& driver_;
  const DriverMemory& memory_;
  const CaptureFunctions* const functions_ = driver_.launcher()->captures(); // null: there are no library calls
  std::vector<Call> calls_; // in the order of the commands
  std::vector<void*> replaced_;
};

bool overlap(const Copy& copy) {
  const auto* to = static_cast<const char*>(copy.destination);
  const auto* from = static_cast<const char*>(copy.source);
  return to < from + copy.bytes && from < to + copy.bytes;
}

// Commands in the representation of the graph functions, with the arrays that they point to.
class CCommands {
 public:
  CCommands(
      c10::ArrayRef<GraphCommand> commands,
      const DriverMemory& memory,
      std::deque<HostNode>& host_nodes,
      const CapturedCalls& captured_calls)
      : memory_(memory), next_host_node_(host_nodes.begin()), captured_calls_(captured_calls) {
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
    arguments_.push_back(resolved(launch.arguments, memory_));
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

  void add(const LibraryCall&, CCommand& made) {
    made.kind = CCommand::Captured;
    made.argument = captured_calls_.of(next_library_call_++);
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
  const CapturedCalls& captured_calls_;
  size_t next_library_call_ = 0;
  std::vector<CCommand> commands_;
  std::deque<c10::SmallVector<CArgument, 32>> arguments_;
  std::deque<std::vector<uint64_t>> after_;
};

class DriverGraph final : public NativeGraph {
 public:
  DriverGraph(
      c10::ArrayRef<GraphCommand> commands, DriverObject& driver, const DriverMemory& memory, DriverStreams& streams)
      : functions_(*driver.launcher()->graphs()),
        driver_(driver),
        memory_(memory),
        streams_(streams),
        captured_calls_(driver, memory) {
    for (const GraphCommand& one : commands) {
      if (const auto* callback = std::get_if<HostCallback>(one.command)) {
        host_nodes_->push_back({callback->function, callback->memory.vec(), callback->numbers.vec()});
      }
    }
    captured_calls_.capture(commands);
    try {
      create(commands);
    } catch (const NativeError& error) {
      driver_.errors().convert(error, driver_.object(), "creating a graph");
    }
  }

  ~DriverGraph() override {
    if (!Py_IsInitialized() || driver_.errors().is_lost()) {
      static_cast<void>(host_nodes_.release()); // a queue can still call them
      captured_calls_.abandon();
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
    const CCommands given(commands, memory_, *host_nodes_, captured_calls_);
    void* graph = nullptr;
    check_status("graph_create", functions_.create(given.data(), given.size(), &graph));
    graph_ = graph;
    generation_ = generation;
  }

  void update(c10::ArrayRef<GraphCommand> commands) {
    const uint64_t generation = memory_.generation();
    int updated = 0;
    captured_calls_.capture(commands);
    {
      const CCommands given(commands, memory_, *host_nodes_, captured_calls_);
      check_status("graph_update", functions_.update(graph_, given.data(), given.size(), &updated));
    }
    if (updated != 0) {
      generation_ = generation;
    } else {
      void* const before = graph_;
      create(commands);
      check_status("graph_destroy", functions_.destroy(before));
    }
    captured_calls_.discard_replaced();
  }

  const GraphFunctions& functions_; // of the launcher, which lives as long as the process
  DriverObject& driver_;
  const DriverMemory& memory_;
  DriverStreams& streams_;
  std::unique_ptr<std::deque<HostNode>> host_nodes_ = std::make_unique<std::deque<HostNode>>();
  std::mutex lock_; // held while a launch uses what follows
  CapturedCalls captured_calls_;
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
        (std::holds_alternative<LibraryCall>(command) && launcher->captures() != nullptr) ||
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
  const bool calls_libraries = std::any_of(commands.begin(), commands.end(), [](const GraphCommand& one) {
    return std::holds_alternative<LibraryCall>(*one.command);
  });
  if (!calls_libraries) {
    return std::make_unique<DriverGraph>(commands, driver, memory, streams);
  }
  try {
    return std::make_unique<DriverGraph>(commands, driver, memory, streams);
  } catch (const c10::AcceleratorError& error) {
    driver.errors().check();
    TORCH_WARN("replays of this graph submit its commands one by one: ", error.what_without_backtrace());
    return nullptr;
  }
}

} // namespace backplane
