#include "drivers/c_launcher.h"

#include <c10/util/Exception.h>

#include <optional>

#include "devices/device.h"
#include "drivers/driver_graph.h"

namespace backplane {
namespace {

// The functions as docs/driver-contract.md declares them. `queue`, `kernel` and `memory` are results of the driver's
// native_… methods. Each function returns 0, or a status that the driver's native_error() converts to an exception.
using Launch = int (*)(
    void* queue,
    void* kernel,
    const uint64_t* items,
    const uint64_t* group,
    const CArgument* arguments,
    uint64_t count);
struct LaunchWithAttributes { // launch_t
  uint64_t items[3];
  uint64_t group[3];
  uint64_t dynamic_shared_memory;
  uint64_t cluster[3];
  uint64_t cooperative;
};
using LaunchAttributesFunction =
    int (*)(void* queue, void* kernel, const LaunchWithAttributes* launch, const CArgument* arguments, uint64_t count);
using CopyFunction =
    int (*)(void* queue, void* to, uint64_t to_offset, void* from, uint64_t from_offset, uint64_t bytes);
using FillFunction = int (*)(void* queue, void* memory, uint64_t offset, uint64_t bytes, int value);
using Flush = int (*)(void* queue);

using CopyIn = int (*)(void* queue, void* to, uint64_t to_offset, const void* from, uint64_t bytes);
using CopyOut = int (*)(void* queue, void* to, void* from, uint64_t from_offset, uint64_t bytes);
using CreateEvent = int (*)(int timing, void** event);
using OfEvent = int (*)(void* event);
using OfEventAndQueue = int (*)(void* event, void* queue);
using QueryEvent = int (*)(void* event, int* is_reached);
using Elapsed = int (*)(void* start, void* end, double* milliseconds);
using ExportHandle = int (*)(void* memory_or_event, char* handle);
using ImportMemory = int (*)(const char* handle, uint64_t bytes, void** memory);
using CreateSharedEvent = int (*)(void** event);
using ImportEvent = int (*)(const char* handle, void** event);
using HostCallbackFunction = int (*)(void* queue, void (*function)(void*), void* argument);

struct Functions {
  Launch launch;
  CopyFunction copy;
  FillFunction fill;
  Flush flush;
  // Optional; each group is present or missing as a whole.
  LaunchAttributesFunction launch_with_attributes = nullptr;
  CopyIn copy_in = nullptr;
  CopyOut copy_out = nullptr;
  CreateEvent create_event = nullptr;
  OfEvent destroy_event = nullptr;
  OfEventAndQueue record_event = nullptr;
  OfEventAndQueue wait_event = nullptr;
  QueryEvent query_event = nullptr;
  OfEvent synchronize_event = nullptr;
  Elapsed elapsed = nullptr;
  HostCallbackFunction host_callback = nullptr;
  CopyFunction copy_from_peer = nullptr;
  OfEventAndQueue wait_peer_event = nullptr;
  ExportHandle export_memory = nullptr;
  ImportMemory import_memory = nullptr;
  OfEvent close_memory = nullptr;
  CreateSharedEvent create_shared_event = nullptr;
  ExportHandle export_event = nullptr;
  ImportEvent import_event = nullptr;
  std::optional<GraphFunctions> graphs;
  std::optional<CaptureFunctions> captures;
};

class CKernel final : public NativeKernel {
 public:
  CKernel(const Functions& functions, void* kernel) : functions_(functions), kernel_(kernel) {}

  void launch(
      void* queue, const LaunchSpec& size, c10::ArrayRef<LaunchArgument> arguments, uint64_t /*generation*/) override {
    const auto given = c_arguments(arguments);
    LaunchWithAttributes launch;
    launch.dynamic_shared_memory = size.dynamic_shared_memory;
    launch.cooperative = size.cooperative ? 1 : 0;
    for (size_t i = 0; i < 3; ++i) {
      launch.items[i] = size.global_size[i];
      launch.group[i] = size.group_size[i];
      launch.cluster[i] = size.cluster[i];
    }
    if (C10_UNLIKELY(size.has_attributes())) {
      check_status(
          "launch_with_attributes",
          functions_.launch_with_attributes(queue, kernel_, &launch, given.data(), given.size()));
    } else {
      check_status("launch", functions_.launch(queue, kernel_, launch.items, launch.group, given.data(), given.size()));
    }
  }

 private:
  const Functions& functions_; // of the launcher, which lives as long as the process
  void* const kernel_;
};

class CEvent final : public NativeEvent {
 public:
  CEvent(const Functions& functions, bool timing) : functions_(functions) {
    check_status("create_event", functions_.create_event(timing ? 1 : 0, &event_));
  }
  CEvent(const Functions& functions, void* event) : functions_(functions), event_(event) {}
  // A destructor cannot throw; the next call reports a failure of the device.
  ~CEvent() override {
    if (event_ != nullptr) {
      static_cast<void>(functions_.destroy_event(event_));
    }
  }

  void record(void* queue) override {
    check_status("record_event", functions_.record_event(event_, queue));
  }

  void wait(void* queue) override {
    check_status("wait_event", functions_.wait_event(event_, queue));
  }

  void wait_on_peer(void* queue) override {
    check_status("wait_peer_event", functions_.wait_peer_event(event_, queue));
  }

  bool query() override {
    int is_reached = 0;
    check_status("query_event", functions_.query_event(event_, &is_reached));
    return is_reached != 0;
  }

  void synchronize() override {
    const GilReleased released; // the pending work can need the GIL
    check_status("synchronize_event", functions_.synchronize_event(event_));
  }

  double elapsed_ms(NativeEvent& start) override {
    double milliseconds = 0;
    check_status("elapsed", functions_.elapsed(static_cast<CEvent&>(start).event_, event_, &milliseconds));
    return milliseconds;
  }

  void* handle() const {
    return event_;
  }

 private:
  const Functions& functions_; // of the launcher, which lives as long as the process
  void* event_ = nullptr;
};

class CInterprocess final : public NativeInterprocess {
 public:
  explicit CInterprocess(const Functions& functions) : functions_(functions) {}

  InterprocessHandle export_memory(void* memory) const override {
    InterprocessHandle handle{};
    check_status("export_memory", functions_.export_memory(memory, handle.data()));
    return handle;
  }

  void* import_memory(const InterprocessHandle& handle, size_t bytes) const override {
    void* memory = nullptr;
    check_status("import_memory", functions_.import_memory(handle.data(), bytes, &memory));
    return memory;
  }

  void close_memory(void* memory) const override {
    check_status("close_memory", functions_.close_memory(memory));
  }

  std::unique_ptr<NativeEvent> create_event() const override {
    void* event = nullptr;
    check_status("create_shared_event", functions_.create_shared_event(&event));
    return std::make_unique<CEvent>(functions_, event);
  }

  InterprocessHandle export_event(NativeEvent& event) const override {
    InterprocessHandle handle{};
    check_status("export_event", functions_.export_event(static_cast<CEvent&>(event).handle(), handle.data()));
    return handle;
  }

  std::unique_ptr<NativeEvent> import_event(const InterprocessHandle& handle) const override {
    void* event = nullptr;
    check_status("import_event", functions_.import_event(handle.data(), &event));
    return std::make_unique<CEvent>(functions_, event);
  }

 private:
  const Functions& functions_; // of the launcher
};

class CLauncher final : public NativeLauncher {
 public:
  explicit CLauncher(const Functions& functions) : functions_(functions), interprocess_(functions_) {}

  const char* api() const override {
    return "c";
  }

  std::unique_ptr<NativeKernel> kernel(void* kernel, const std::string& /*text*/) const override {
    return std::make_unique<CKernel>(functions_, kernel);
  }

  bool launches_with_attributes() const override {
    return functions_.launch_with_attributes != nullptr;
  }

  void copy(void* queue, const LaunchArgument& destination, const LaunchArgument& source, size_t bytes) const override {
    check_status(
        "copy", functions_.copy(queue, destination.memory, destination.offset, source.memory, source.offset, bytes));
  }

  void fill(void* queue, const LaunchArgument& memory, uint8_t value, size_t bytes) const override {
    check_status("fill", functions_.fill(queue, memory.memory, memory.offset, bytes, value));
  }

  bool copies_host_memory() const override {
    return functions_.copy_in != nullptr;
  }

  void copy_in(void* queue, const LaunchArgument& to, const void* from, size_t bytes) const override {
    check_status("copy_in", functions_.copy_in(queue, to.memory, to.offset, from, bytes));
  }

  void copy_out(void* queue, void* to, const LaunchArgument& from, size_t bytes) const override {
    check_status("copy_out", functions_.copy_out(queue, to, from.memory, from.offset, bytes));
  }

  bool has_events() const override {
    return functions_.create_event != nullptr;
  }

  std::unique_ptr<NativeEvent> create_event(bool timing) const override {
    return std::make_unique<CEvent>(functions_, timing);
  }

  void flush(void* queue) const override {
    check_status("flush", functions_.flush(queue));
  }

  bool calls_host() const override {
    return functions_.host_callback != nullptr;
  }

  void call_host(void* queue, std::function<void()> function) const override {
    auto call = std::make_unique<std::function<void()>>(std::move(function));
    const auto call_now = [](void* given) {
      const std::unique_ptr<std::function<void()>> held(static_cast<std::function<void()>*>(given));
      (*held)();
    };
    check_status("host_callback", functions_.host_callback(queue, call_now, call.get()));
    static_cast<void>(call.release()); // call_now owns it
  }

  bool copies_from_peers() const override {
    return functions_.copy_from_peer != nullptr;
  }

  void copy_from_peer(void* queue, const LaunchArgument& to, const LaunchArgument& from, size_t bytes) const override {
    check_status(
        "copy_from_peer", functions_.copy_from_peer(queue, to.memory, to.offset, from.memory, from.offset, bytes));
  }

  bool waits_for_peers() const override {
    return functions_.wait_peer_event != nullptr;
  }

  const NativeInterprocess* interprocess() const override {
    return functions_.export_memory != nullptr ? &interprocess_ : nullptr;
  }

  const GraphFunctions* graphs() const override {
    return functions_.graphs.has_value() ? &*functions_.graphs : nullptr;
  }

  const CaptureFunctions* captures() const override {
    return functions_.captures.has_value() ? &*functions_.captures : nullptr;
  }

 private:
  const Functions functions_;
  const CInterprocess interprocess_;
};

} // namespace

std::unique_ptr<NativeLauncher> make_c_launcher(const std::map<std::string, uintptr_t>& functions) {
  const auto find = [&](const char* name) { return function_of(functions, "c", name); };
  Functions found{
      reinterpret_cast<Launch>(find("launch")), reinterpret_cast<CopyFunction>(find("copy")),
      reinterpret_cast<FillFunction>(find("fill")), reinterpret_cast<Flush>(find("flush"))};
  if (has_function(functions, "launch_with_attributes")) {
    found.launch_with_attributes = reinterpret_cast<LaunchAttributesFunction>(find("launch_with_attributes"));
  }
  if (has_function(functions, "copy_in")) {
    found.copy_in = reinterpret_cast<CopyIn>(find("copy_in"));
    found.copy_out = reinterpret_cast<CopyOut>(find("copy_out"));
  }
  if (has_function(functions, "create_event")) {
    found.create_event = reinterpret_cast<CreateEvent>(find("create_event"));
    found.destroy_event = reinterpret_cast<OfEvent>(find("destroy_event"));
    found.record_event = reinterpret_cast<OfEventAndQueue>(find("record_event"));
    found.wait_event = reinterpret_cast<OfEventAndQueue>(find("wait_event"));
    found.query_event = reinterpret_cast<QueryEvent>(find("query_event"));
    found.synchronize_event = reinterpret_cast<OfEvent>(find("synchronize_event"));
    found.elapsed = reinterpret_cast<Elapsed>(find("elapsed"));
  }
  if (has_function(functions, "host_callback")) {
    found.host_callback = reinterpret_cast<HostCallbackFunction>(find("host_callback"));
  }
  if (has_function(functions, "copy_from_peer")) {
    found.copy_from_peer = reinterpret_cast<CopyFunction>(find("copy_from_peer"));
  }
  if (has_function(functions, "wait_peer_event")) {
    found.wait_peer_event = reinterpret_cast<OfEventAndQueue>(find("wait_peer_event"));
  }
  if (has_function(functions, "export_memory")) {
    found.export_memory = reinterpret_cast<ExportHandle>(find("export_memory"));
    found.import_memory = reinterpret_cast<ImportMemory>(find("import_memory"));
    found.close_memory = reinterpret_cast<OfEvent>(find("close_memory"));
    found.create_shared_event = reinterpret_cast<CreateSharedEvent>(find("create_shared_event"));
    found.export_event = reinterpret_cast<ExportHandle>(find("export_event"));
    found.import_event = reinterpret_cast<ImportEvent>(find("import_event"));
  }
  if (has_function(functions, "graph_create")) {
    found.graphs = GraphFunctions{
        reinterpret_cast<decltype(GraphFunctions::create)>(find("graph_create")),
        reinterpret_cast<decltype(GraphFunctions::update)>(find("graph_update")),
        reinterpret_cast<decltype(GraphFunctions::launch)>(find("graph_launch")),
        reinterpret_cast<decltype(GraphFunctions::destroy)>(find("graph_destroy"))};
  }
  if (has_function(functions, "begin_capture")) {
    found.captures = CaptureFunctions{
        reinterpret_cast<decltype(CaptureFunctions::begin)>(find("begin_capture")),
        reinterpret_cast<decltype(CaptureFunctions::end)>(find("end_capture")),
        reinterpret_cast<decltype(CaptureFunctions::destroy)>(find("destroy_captured"))};
  }
  return std::make_unique<CLauncher>(found);
}

} // namespace backplane
