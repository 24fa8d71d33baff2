#include "drivers/driver_device.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <optional>
#include <string_view>
#include <vector>

#include "devices/compiled_kernel.h"
#include "devices/profile.h"
#include "devices/queue_function.h"
#include "devices/verbose.h"
#include "drivers/driver_graph.h"
#include "drivers/driver_interprocess.h"
#include "drivers/driver_kernel.h"
#include "drivers/driver_memory.h"
#include "drivers/driver_object.h"
#include "drivers/driver_stream.h"

namespace py = pybind11;

namespace backplane {
namespace {

py::memoryview read_only(const void* memory, size_t bytes) {
  return py::memoryview::from_memory(memory, static_cast<py::ssize_t>(bytes));
}

py::memoryview writable(void* memory, size_t bytes) {
  return py::memoryview::from_memory(memory, static_cast<py::ssize_t>(bytes), /*readonly=*/false);
}

bool overlap(const void* one, const void* other, size_t bytes) {
  const auto* first = std::min(static_cast<const char*>(one), static_cast<const char*>(other));
  const auto* second = std::max(static_cast<const char*>(one), static_cast<const char*>(other));
  return static_cast<size_t>(second - first) < bytes;
}

DriverKernel& kernel_of(KernelHandle kernel) {
  return *static_cast<DriverKernel*>(kernel);
}

// The integers, floats and doubles among the arguments of a library function, for the log: "(1, 0, 64)".
std::string numbers_of(const QueueFunction& function, c10::ArrayRef<LaunchArgument> arguments) {
  std::string line = "(";
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto dtype = function.parameters()[i].number.value_or(c10::ScalarType::Undefined);
    const void* data = arguments[i].data;
    line += line.size() > 1 && (dtype == c10::kLong || dtype == c10::kFloat || dtype == c10::kDouble) ? ", " : "";
    line += dtype == c10::kLong ? c10::str(*static_cast<const int64_t*>(data))
        : dtype == c10::kFloat  ? c10::str(*static_cast<const float*>(data))
        : dtype == c10::kDouble ? c10::str(*static_cast<const double*>(data))
                                : "";
  }
  return line + ")";
}

class DriverDevice final : public Device {
 public:
  DriverDevice(c10::DeviceIndex index, DeviceProperties given, py::object device, bool discrete)
      : Device(std::move(given)),
        index_(index),
        driver_(index, properties().name, std::move(device)),
        memory_(driver_, properties()),
        streams_(driver_, [this](const Command& command, DriverStream& stream) { execute(command, stream); }),
        discrete_(discrete),
        can_pin_(driver_.attr("can_pin")().cast<bool>()),
        can_adopt_streams_(driver_.attr("can_adopt_streams")().cast<bool>()),
        launches_with_attributes_(
            driver_.launcher() != nullptr ? driver_.launcher()->launches_with_attributes()
                                          : driver_.attr("can_launch_with_attributes")().cast<bool>()) {
    if (driver_.launcher() != nullptr && driver_.launcher()->interprocess() != nullptr) {
      interprocess_.emplace(*driver_.launcher()->interprocess(), driver_, memory_, streams_);
    }
  }

  bool needs_gil() const override {
    return true;
  }

  bool is_lost() const noexcept override {
    return driver_.errors().is_lost();
  }

  void check_not_lost() const override {
    driver_.errors().check();
  }

  // --- memory
  void* allocate(size_t bytes) override {
    return memory_.allocate(bytes);
  }

  void free(void* address, size_t bytes) override {
    give_back([&] { memory_.free(address, bytes); });
  }

  std::pair<size_t, size_t> memory_info() override {
    return memory_.info();
  }

  bool can_reserve() const override {
    return memory_.can_reserve();
  }

  void* reserve(size_t bytes) override {
    return memory_.reserve(bytes);
  }

  void unreserve(void* address, size_t bytes) override {
    give_back([&] { memory_.unreserve(address, bytes); });
  }

  bool map(void* address, size_t bytes) override {
    return memory_.map(address, bytes);
  }

  void unmap(void* address, size_t bytes) override {
    give_back([&] { memory_.unmap(address, bytes); });
  }

  bool can_pin() const override {
    return can_pin_;
  }

  void* pin(void* memory, size_t bytes) override {
    driver_.errors().check();
    DriverCall call;
    try {
      return driver_.errors().watch(Doing{"pinning ", bytes, " bytes of host memory"}, [&]() -> void* {
        return driver_.attr("pin")(writable(memory, bytes)).release().ptr();
      });
    } catch (py::error_already_set& error) {
      TORCH_CHECK_WITH(
          OutOfMemoryError, !error.matches(PyExc_MemoryError), "bp out of memory. Tried to pin ", bytes,
          " bytes of host memory for ", properties().name, ": ", py::str(error.value()).cast<std::string>());
      throw;
    }
  }

  void unpin(void* pinned) override {
    if (!Py_IsInitialized()) {
      return;
    }
    DeviceCall gil(true);
    const py::error_scope kept; // the caller can be a destructor that runs while an exception propagates
    driver_.call_quietly("unpin", py::reinterpret_steal<py::object>(static_cast<PyObject*>(pinned)));
  }

  // --- streams and events
  StreamHandle create_stream(int priority) override {
    return streams_.create_stream(priority);
  }

  void destroy_stream(StreamHandle stream) noexcept override {
    streams_.destroy_stream(stream);
  }

  bool query_stream(StreamHandle stream) override {
    return streams_.query_stream(stream);
  }

  void synchronize_stream(StreamHandle stream) override {
    streams_.synchronize_stream(stream);
  }

  uintptr_t native_handle(StreamHandle stream) override {
    return streams_.native_handle(stream);
  }

  bool can_adopt_streams() const override {
    return can_adopt_streams_;
  }

  StreamHandle adopt_stream(uintptr_t native) override {
    return streams_.adopt_stream(native);
  }

  EventHandle create_event(bool timing) override {
    return streams_.create_event(timing);
  }

  void destroy_event(EventHandle event) noexcept override {
    streams_.destroy_event(event);
  }

  bool query_event(EventHandle event) override {
    return streams_.query_event(event);
  }

  void synchronize_event(EventHandle event) override {
    streams_.synchronize_event(event);
  }

  double elapsed_ms(EventHandle start, EventHandle end) override {
    return streams_.elapsed_ms(start, end);
  }

  std::unique_ptr<CommandTimer> time_commands(StreamHandle stream) override {
    auto timer = streams_.time_commands(stream);
    return timer != nullptr ? std::move(timer) : Device::time_commands(stream);
  }

  // --- commands
  void submit(const Command& command, StreamHandle handle) override {
    if (is_empty(command)) {
      return;
    }
    driver_.errors().check();
    DriverStream& stream = streams_.known(handle);
    c10::intrusive_ptr<KernelBuild> build; // the build that the command waits for
    if (const auto* launch = std::get_if<KernelLaunch>(&command)) {
      DriverKernel& kernel = kernel_of(launch->kernel->handle());
      if (C10_UNLIKELY(launch->spec.has_attributes())) {
        check_attributes(launch->spec, kernel);
      }
      if (C10_UNLIKELY(Profile::is_active())) { // a profile times each command, so it must not be deferred
        const GilReleased released;
        kernel.wait();
      }
      if (C10_UNLIKELY(!kernel.is_built())) {
        if (kernel.is_over()) {
          kernel.check();
        }
        build = c10::intrusive_ptr<KernelBuild>::reclaim_copy(&kernel);
      }
    } else {
      check_offered(command);
    }
    if (C10_LIKELY(build == nullptr && !stream.deferred.any() && !std::holds_alternative<EventWait>(command))) {
      execute(command, stream);
    } else {
      streams_.submit(command, stream, std::move(build));
    }
  }

  bool copy_from_peer(void* destination, Device& peer, const void* source, size_t bytes, StreamHandle handle) override {
    auto* other = dynamic_cast<DriverDevice*>(&peer);
    if (other == nullptr) {
      return false;
    }
    if (bytes == 0) {
      return true;
    }
    DriverStream& stream = streams_.known(handle);
    stream.deferred.issue_all();
    stream.throw_failure();
    const auto to = memory_.place_of(destination, bytes);
    const auto from = other->memory_.place_of(source, bytes);
    constexpr const char* kDoing = "copying from another device";
    if (driver_.launcher() != nullptr && driver_.launcher()->copies_from_peers() && is_peer(*other) &&
        can_access_.of(*this, *other)) {
      streams_.natively(stream, Doing{kDoing}, [&] {
        driver_.launcher()->copy_from_peer(
            stream.native, memory_.resolve({destination, 0}), other->memory_.resolve({source, 0}), bytes);
      });
      return true;
    }
    const DriverStreams::Submission submission(streams_, stream);
    return driver_.ask(kDoing, [&] {
      const py::handle peer_device = other->driver_.object(), queue = stream.object;
      return driver_.attr("copy_from_peer")(to.segment, to.offset, peer_device, from.segment, from.offset, bytes, queue)
          .cast<bool>();
    });
  }

  bool can_access_peer(const Device& peer) const override {
    const auto* other = dynamic_cast<const DriverDevice*>(&peer);
    return other != nullptr && can_access_.of(*this, *other);
  }

  bool wait_for_signal(c10::intrusive_ptr<HostSignal> signal, StreamHandle stream) override {
    driver_.errors().check();
    streams_.wait_for_signal(std::move(signal), stream);
    return true;
  }

  bool wait_for_peer(Device& peer, EventHandle event, StreamHandle stream) override {
    auto* other = dynamic_cast<DriverDevice*>(&peer);
    return other != nullptr && is_peer(*other) && can_wait_for_.of(*this, *other) &&
        streams_.wait_for_peer(other->streams_, event, stream);
  }

  bool host_sees_memory() const override {
    const NativeLauncher* launcher = driver_.launcher();
    return properties().host_accessible() || (launcher != nullptr && launcher->host_sees_memory() && !discrete_);
  }

  void sleep(double milliseconds, StreamHandle handle) override {
    DriverStream& stream = streams_.known(handle);
    stream.deferred.issue_all();
    stream.throw_failure();
    streams_.ask(
        stream, {"keeping a stream busy"}, [&] { driver_.attr("sleep")(milliseconds, py::handle(stream.object)); });
  }

  Interprocess* interprocess() override {
    return interprocess_.has_value() ? &*interprocess_ : nullptr;
  }

  std::unique_ptr<NativeGraph> instantiate(c10::ArrayRef<GraphCommand> commands) override {
    return make_driver_graph(commands, driver_, memory_, streams_);
  }

  // --- kernels
  KernelHandle compile(KernelSource source) override {
    if (properties().dialect.empty()) {
      return Device::compile(std::move(source)); // throws
    }
    driver_.errors().check();
    const bool is_binary = source.is_binary;
    auto kernel = c10::make_intrusive<DriverKernel>(std::move(source), driver_, [this] { streams_.issue_ready(); });
    if (is_binary) { // nothing to compile: load it now, so that the caller gets the error
      const GilReleased released;
      kernel->run();
      kernel->check();
      return kernel.release();
    }
    DriverCall call;
    const py::cpp_function run([kernel] {
      const GilReleased released;
      kernel->run();
    });
    py::module_::import("torch_backplane.drivers.builds").attr("submit")(run);
    return kernel.release();
  }

  void destroy_kernel(KernelHandle kernel) noexcept override {
    c10::intrusive_ptr<DriverKernel>::reclaim(&kernel_of(kernel)); // deferred launches hold references
  }

  KernelResources kernel_resources(KernelHandle handle) override {
    DriverKernel& kernel = kernel_of(handle);
    {
      const GilReleased released;
      kernel.wait();
    }
    kernel.check();
    return kernel.resources();
  }

  std::string queue_api() const override {
    const NativeLauncher* launcher = driver_.launcher();
    return launcher == nullptr ? "" : std::string_view(launcher->api()) == "c" ? properties().driver : launcher->api();
  }

 private:
  template <typename Function>
  void give_back(const Function& function) {
    if (!Py_IsInitialized()) {
      return; // the process is exiting, which frees the memory
    }
    DriverCall call;
    const py::error_scope kept; // the caller can be a destructor that runs while an exception propagates
    // The driver contract says that no pending work uses the memory. The allocator only knows that no later work will.
    streams_.finish_work();
    function();
  }

  // Caches the results of a driver method that answers yes or no for a peer, so that later calls need no GIL.
  class PeerAnswers {
   public:
    explicit PeerAnswers(const char* method) : method_(method) {}

    bool of(const DriverDevice& device, const DriverDevice& peer) const {
      std::atomic<int8_t>& known = known_[peer.index_];
      if (known.load(std::memory_order_relaxed) == 0) {
        DriverCall call;
        const bool answer = device.driver_.attr(method_)(peer.driver_.object()).cast<bool>();
        known.store(answer ? 1 : -1, std::memory_order_relaxed);
      }
      return known.load(std::memory_order_relaxed) > 0;
    }

   private:
    const char* const method_;
    mutable std::array<std::atomic<int8_t>, 64> known_{}; // by device index: 1 yes, -1 no, 0 unknown
  };

  // The functions of a launcher only take handles of their own driver.
  bool is_peer(const DriverDevice& other) const {
    return other.properties().driver == properties().driver;
  }

  // Throws if the device does not support the command. Kernel launches need no check, as compile() checks.
  void check_offered(const Command& command) const {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !std::holds_alternative<LibraryCall>(command) || driver_.launcher() != nullptr, properties().name,
        " has no native launcher, so it cannot run library functions, which need its native queue");
    const auto* callback = std::get_if<HostCallback>(&command);
    TORCH_CHECK(
        callback == nullptr || callback->memory.empty() || host_sees_memory(), "the host does not see the memory of ",
        properties().name);
  }

  // Throws if a launch with these attributes is not possible. The kernel's static shared memory is only known when it
  // is built, so execute() checks the sum. Binaries can have another limit than generated kernels.
  void check_attributes(const LaunchSpec& spec, const DriverKernel& kernel) const {
    TORCH_CHECK_NOT_IMPLEMENTED(
        launches_with_attributes_, "bp:", static_cast<int>(index_), " (", properties().name, ") cannot launch ",
        kernel.name(), " with attributes", attributes_text(spec), ": its driver offers ",
        driver_.launcher() == nullptr
            ? "no launch_with_attributes() method"
            : "no launch_with_attributes function, the group LAUNCH_ATTRIBUTES of a native launcher of the api \"c\"");
    for (size_t i = 0; i < 3; ++i) {
      TORCH_CHECK_VALUE(
          spec.global_size[i] / spec.group_size[i] % spec.cluster[i] == 0, kernel.name(), " has ",
          spec.global_size[i] / spec.group_size[i], " groups in dimension ", i, ", which is not a multiple of the ",
          spec.cluster[i], " of a cluster");
    }
    if (!kernel.is_binary()) {
      check_shared_memory(spec, kernel, 0);
    }
  }

  // Requires that the kernel is built.
  void check_shared_memory(const LaunchSpec& spec, DriverKernel& kernel) const {
    const auto most = kernel.most_dynamic_shared_memory();
    if (!most.has_value()) {
      check_shared_memory(spec, kernel, kernel.resources().static_shared_memory.value_or(0));
      return;
    }
    TORCH_CHECK(
        spec.dynamic_shared_memory <= static_cast<size_t>(*most), kernel.name(), " needs ", spec.dynamic_shared_memory,
        " bytes of dynamic shared memory, and on bp:", static_cast<int>(index_), " (", properties().name,
        ") it can have ", *most);
  }

  void check_shared_memory(const LaunchSpec& spec, const DriverKernel& kernel, size_t of_kernel) const {
    TORCH_CHECK(
        spec.dynamic_shared_memory + of_kernel <= properties().local_memory, kernel.name(), " needs ", of_kernel,
        " bytes of static and ", spec.dynamic_shared_memory,
        " bytes of dynamic shared memory, and a group of bp:", static_cast<int>(index_), " (", properties().name,
        ") has ", properties().local_memory, " (Target.local_memory)");
  }

  // Submits the command to the driver immediately.
  void execute(const Command& command, DriverStream& stream) {
    std::visit([&](const auto& one) { execute(one, stream); }, command);
  }

  void execute(const EventRecord& record, DriverStream& stream) {
    streams_.record_event(record, stream);
  }

  void execute(const EventWait& wait, DriverStream& stream) {
    streams_.wait_event(wait, stream);
  }

  void execute(const KernelLaunch& launch, DriverStream& stream) {
    DriverKernel& kernel = kernel_of(launch.kernel->handle());
    if (C10_UNLIKELY(launch.spec.dynamic_shared_memory > 0)) {
      check_shared_memory(launch.spec, kernel);
    }
    const auto arguments = resolve(launch.arguments);
    const auto doing = [&] { return c10::str("launching ", kernel.name()); };
    if (driver_.launcher() == nullptr) {
      const DriverStreams::Submission submission(streams_, stream);
      const DeviceCall gil(true); // also while watch() converts an error
      driver_.errors().watch(doing, [&] { kernel.launch(stream.object, launch.spec, arguments, 0); });
      return;
    }
    streams_.natively(
        stream, doing, [&] { kernel.launch(stream.native, launch.spec, arguments, memory_.generation()); });
  }

  void execute(const LibraryCall& library_call, DriverStream& stream) {
    const QueueFunction& function = *library_call.function;
    const auto arguments = resolve(library_call.arguments);
    const auto doing = [&] { return c10::str("calling ", function.name(), " for ", *library_call.caller); };
    streams_.natively(stream, doing, [&] {
      const auto given = c_arguments(arguments);
      const auto call = reinterpret_cast<int (*)(void*, const CArgument*, uint64_t)>(function.address());
      int status = 0;
      {
        const GilReleased released; // a thread that executes deferred commands can hold it
        run_verbosely(
            [&] { status = call(stream.native, given.data(), given.size()); },
            [&] {
              return c10::str(
                  "bp:", static_cast<int>(index_), " driver ", function.name(), numbers_of(function, arguments),
                  ", given to the queue");
            });
      }
      if (C10_UNLIKELY(status != 0)) {
        stream.launches.fetch_add(1, std::memory_order_relaxed); // part of its work can be pending
        throw_if_lost(stream); // the library's status does not tell
        driver_.errors().fail(doing(), function.name(), status, function.explain(status));
      }
    });
  }

  // Asks the driver whether the device is lost.
  void throw_if_lost(DriverStream& stream) {
    try {
      driver_.ask("querying a stream", [&] {
        driver_.attr("launched_natively")(py::handle(stream.object));
        driver_.attr("query_stream")(py::handle(stream.object));
      });
    } catch (const c10::Error&) { // of the query; the caller reports another one
      driver_.errors().check();
    }
  }

  void execute(const HostCallback& callback, DriverStream& stream) {
    const NativeLauncher* launcher = driver_.launcher();
    if (launcher == nullptr || !launcher->calls_host()) {
      streams_.synchronize_stream(&stream);
      callback.function->run(callback.memory.data(), callback.numbers.data());
      return;
    }
    constexpr Doing kDoing{"submitting a host callback"};
    if (!launcher->host_sees_memory()) { // addresses in the command, if any, are host addresses already
      streams_.natively(stream, kDoing, [&] {
        launcher->call_host(
            stream.native,
            [function = callback.function, numbers = callback.numbers.vec(), memory = callback.memory.vec()]() mutable {
              const InHostCallback here;
              function->run(memory.data(), numbers.data());
              function = nullptr; // destroy it while `here` exists, as it can submit commands
            });
      });
      return;
    }
    std::vector<LaunchArgument> memory;
    for (const char* address : callback.memory) {
      memory.push_back(memory_.resolve({address, 0}));
    }
    streams_.natively(stream, kDoing, [&] {
      launcher->call_host(
          stream.native,
          [function = callback.function, numbers = callback.numbers.vec(),
           seen = launcher->host_memory(stream.native, memory, memory_.generation())]() mutable {
            const InHostCallback here;
            function->run(seen.addresses().data(), numbers.data());
            function = nullptr; // destroy it while `here` exists, as it can submit commands
          });
    });
  }

  void execute(const Fill& fill, DriverStream& stream) {
    const Doing doing{"filling ", fill.bytes, " bytes"};
    const auto to = memory_.place_of(fill.address, fill.bytes); // checks the range
    if (driver_.launcher() != nullptr) {
      streams_.natively(stream, doing, [&] {
        driver_.launcher()->fill(stream.native, memory_.resolve({fill.address, 0}), fill.value, fill.bytes);
      });
    } else {
      streams_.ask(stream, doing, [&] {
        driver_.attr("fill")(to.segment, to.offset, fill.bytes, fill.value, py::handle(stream.object));
      });
    }
  }

  void execute(const Copy& copy, DriverStream& stream) {
    switch (copy.kind) {
      case CopyKind::HostToDevice:
        copy_in(copy, stream);
        break;
      case CopyKind::DeviceToHost:
        copy_out(copy, stream);
        break;
      case CopyKind::WithinDevice:
        copy_within(copy, stream);
        break;
    }
  }

  bool copies_host_memory() const {
    return driver_.launcher() != nullptr && driver_.launcher()->copies_host_memory();
  }

  void copy_in(const Copy& copy, DriverStream& stream) {
    const Doing doing{"copying ", copy.bytes, " bytes to it"};
    const auto to = memory_.place_of(copy.destination, copy.bytes);
    if (copies_host_memory()) {
      streams_.natively(stream, doing, [&] {
        driver_.launcher()->copy_in(stream.native, memory_.resolve({copy.destination, 0}), copy.source, copy.bytes);
      });
    } else {
      streams_.ask(stream, doing, [&] {
        driver_.attr("copy_in")(to.segment, to.offset, read_only(copy.source, copy.bytes), py::handle(stream.object));
      });
    }
  }

  void copy_out(const Copy& copy, DriverStream& stream) {
    const Doing doing{"copying ", copy.bytes, " bytes from it"};
    const auto from = memory_.place_of(copy.source, copy.bytes);
    if (copies_host_memory()) {
      streams_.natively(stream, doing, [&] {
        driver_.launcher()->copy_out(stream.native, copy.destination, memory_.resolve({copy.source, 0}), copy.bytes);
      });
    } else {
      streams_.ask(stream, doing, [&] {
        driver_.attr("copy_out")(
            from.segment, from.offset, writable(copy.destination, copy.bytes), py::handle(stream.object));
      });
    }
  }

  void copy_within(const Copy& copy, DriverStream& stream) {
    const Doing doing{"copying ", copy.bytes, " bytes within it"};
    const auto to = memory_.place_of(copy.destination, copy.bytes);
    const auto from = memory_.place_of(copy.source, copy.bytes);
    if (driver_.launcher() != nullptr && !overlap(copy.destination, copy.source, copy.bytes)) {
      streams_.natively(stream, doing, [&] {
        driver_.launcher()->copy(
            stream.native, memory_.resolve({copy.destination, 0}), memory_.resolve({copy.source, 0}), copy.bytes);
      });
    } else {
      streams_.ask(stream, doing, [&] {
        driver_.attr("copy")(to.segment, to.offset, from.segment, from.offset, copy.bytes, py::handle(stream.object));
      });
    }
  }

  c10::SmallVector<LaunchArgument, 24> resolve(c10::ArrayRef<KernelArgument> arguments) const {
    c10::SmallVector<LaunchArgument, 24> resolved;
    for (const KernelArgument& argument : arguments) {
      resolved.push_back(memory_.resolve(argument));
    }
    return resolved;
  }

  const c10::DeviceIndex index_;
  DriverObject driver_;
  DriverMemory memory_;
  DriverStreams streams_;
  std::optional<DriverInterprocess> interprocess_;
  const PeerAnswers can_access_{"can_access_peer"};
  const PeerAnswers can_wait_for_{"can_wait_for_peer"};
  const bool discrete_; // hide the memory from the host
  const bool can_pin_;
  const bool can_adopt_streams_;
  const bool launches_with_attributes_;
};

} // namespace

std::unique_ptr<Device> make_driver_device(
    c10::DeviceIndex index, DeviceProperties properties, py::object device, bool discrete) {
  return std::make_unique<DriverDevice>(index, std::move(properties), std::move(device), discrete);
}

} // namespace backplane
