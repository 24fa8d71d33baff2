#include "drivers/driver_device.h"

#include <c10/util/Exception.h>

#include <string_view>
#include <vector>

#include "devices/ending.h"
#include "devices/profile.h"
#include "devices/queue_function.h"
#include "devices/verbose.h"
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

// A copy of a launch's arguments, the numbers included.
class DeferredArguments {
 public:
  explicit DeferredArguments(c10::ArrayRef<LaunchArgument> arguments) : arguments_(arguments.vec()) {
    for (const LaunchArgument& argument : arguments_) {
      const auto* data = static_cast<const char*>(argument.data);
      numbers_.insert(numbers_.end(), data, data + argument.bytes);
    }
  }

  c10::ArrayRef<LaunchArgument> values() {
    const char* data = numbers_.data();
    for (LaunchArgument& argument : arguments_) {
      argument.data = data;
      data += argument.bytes;
    }
    return arguments_;
  }

 private:
  std::vector<LaunchArgument> arguments_;
  std::vector<char> numbers_;
};

// Those that a function of a library is called with, in words: its integers, and what it computes with.
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
        streams_(driver_),
        discrete_(discrete),
        can_pin_(driver_.attr("can_pin")().cast<bool>()) {}

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
    const py::error_scope kept; // a destructor may be at work
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

  EventHandle create_event(bool timing) override {
    return streams_.create_event(timing);
  }

  void destroy_event(EventHandle event) noexcept override {
    streams_.destroy_event(event);
  }

  void record_event(EventHandle event, StreamHandle stream) override {
    streams_.record_event(event, stream);
  }

  void wait_event(EventHandle event, StreamHandle stream) override {
    streams_.wait_event(event, stream);
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

  // --- transfers
  void copy(void* destination, const void* source, size_t bytes, CopyKind kind, StreamHandle handle) override {
    if (bytes == 0) {
      return;
    }
    DriverStream& stream = streams_.known(handle);
    const py::handle queue = stream.object;
    const NativeLauncher* launcher = driver_.launcher();
    const bool natively = launcher != nullptr && launcher->copies_host_memory();
    if (kind == CopyKind::HostToDevice && natively) {
      memory_.place_of(destination, bytes); // checks the range
      streams_.natively_in_order(
          stream, Doing{"copying ", bytes, " bytes to it"},
          [launcher, &stream, to = memory_.resolve({destination, 0}), source, bytes] {
            launcher->copy_in(stream.native, to, source, bytes);
          });
    } else if (kind == CopyKind::DeviceToHost && natively) {
      memory_.place_of(source, bytes);
      streams_.natively_in_order(
          stream, Doing{"copying ", bytes, " bytes from it"},
          [launcher, &stream, from = memory_.resolve({source, 0}), destination, bytes] {
            launcher->copy_out(stream.native, destination, from, bytes);
          });
    } else if (kind == CopyKind::HostToDevice) {
      const auto to = memory_.place_of(destination, bytes);
      streams_.in_order(stream, {"copying ", bytes, " bytes to it"}, [this, to, source, bytes, queue] {
        driver_.attr("copy_in")(to.segment, to.offset, read_only(source, bytes), queue);
      });
    } else if (kind == CopyKind::DeviceToHost) {
      const auto from = memory_.place_of(source, bytes);
      streams_.in_order(stream, {"copying ", bytes, " bytes from it"}, [this, from, destination, bytes, queue] {
        driver_.attr("copy_out")(from.segment, from.offset, writable(destination, bytes), queue);
      });
    } else if (launcher != nullptr && !overlap(destination, source, bytes)) {
      copy_natively(destination, source, bytes, stream);
    } else {
      const auto to = memory_.place_of(destination, bytes);
      const auto from = memory_.place_of(source, bytes);
      streams_.in_order(stream, {"copying ", bytes, " bytes within it"}, [this, to, from, bytes, queue] {
        driver_.attr("copy")(to.segment, to.offset, from.segment, from.offset, bytes, queue);
      });
    }
  }

  void fill(void* address, uint8_t value, size_t bytes, StreamHandle handle) override {
    if (bytes == 0) {
      return;
    }
    DriverStream& stream = streams_.known(handle);
    const auto to = memory_.place_of(address, bytes);
    if (driver_.launcher() != nullptr) {
      streams_.natively_in_order(
          stream, {"filling ", bytes, " bytes"}, [this, &stream, to = memory_.resolve({address, 0}), value, bytes] {
            driver_.launcher()->fill(stream.native, to, value, bytes);
          });
      return;
    }
    streams_.in_order(
        stream, {"filling ", bytes, " bytes"}, [this, to, bytes, value, queue = py::handle(stream.object)] {
          driver_.attr("fill")(to.segment, to.offset, bytes, value, queue);
        });
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
    const DriverStreams::Submission submission(streams_, stream);
    return driver_.ask("copying from another device", [&] {
      const py::handle peer_device = other->driver_.object(), queue = stream.object;
      return driver_
          .attr("copy_from_peer")(to.segment, to.offset, peer_device, from.segment, from.offset, bytes, queue)
          .cast<bool>();
    });
  }

  bool can_access_peer(const Device& peer) const override {
    const auto* other = dynamic_cast<const DriverDevice*>(&peer);
    if (other == nullptr) {
      return false;
    }
    DriverCall call;
    return driver_.attr("can_access_peer")(other->driver_.object()).cast<bool>();
  }

  // --- the host's part
  bool host_sees_memory() const override {
    return properties().host_accessible || (runs_host_functions() && !discrete_);
  }

  void call_host(HostFunction function, c10::ArrayRef<char*> memory, StreamHandle handle) override {
    TORCH_CHECK(memory.empty() || host_sees_memory(), "the host does not see the memory of ", properties().name);
    DriverStream& stream = streams_.known(handle);
    if (!runs_host_functions()) {
      synchronize_stream(handle);
      function(memory.data());
      return;
    }
    std::vector<LaunchArgument> resolved;
    for (const char* address : memory) {
      resolved.push_back(memory_.resolve({address, 0}));
    }
    streams_.natively_in_order(
        stream, Doing{"calling a function of the host"},
        [this, &stream, function = std::move(function), memory = std::move(resolved)] {
          const NativeLauncher& launcher = *driver_.launcher();
          auto seen = launcher.host_memory(stream.native, memory, memory_.generation());
          launcher.call_host(stream.native, [function, seen = std::move(seen)]() mutable {
            const HostCallback callback;
            if (const HostCall call; call.may_run()) {
              function(seen.addresses().data());
            }
            function = nullptr; // here, as what goes with it may submit commands
          });
        });
  }

  void sleep(double milliseconds, StreamHandle handle) override {
    DriverStream& stream = streams_.known(handle);
    streams_.in_order(stream, {"keeping a stream busy"}, [this, milliseconds, queue = py::handle(stream.object)] {
      driver_.attr("sleep")(milliseconds, queue);
    });
  }

  // --- kernels
  KernelHandle compile(const std::string& text, const std::string& entry, const std::string& operator_name) override {
    if (properties().dialect.empty()) {
      return Device::compile(text, entry, operator_name); // refuses
    }
    driver_.errors().check();
    DriverCall call;
    auto kernel = c10::make_intrusive<DriverKernel>(
        DriverKernel::Source{text, entry, operator_name}, driver_, [this] { streams_.issue_ready(); });
    const py::cpp_function run([kernel] {
      const GilReleased released;
      kernel->run();
    });
    py::module_::import("torch_backplane.drivers.builds").attr("submit")(run);
    return kernel.release();
  }

  void destroy_kernel(KernelHandle kernel) noexcept override {
    c10::intrusive_ptr<DriverKernel>::reclaim(&kernel_of(kernel)); // deferred launches keep theirs
  }

  void launch(
      KernelHandle handle, const LaunchSize& size, c10::ArrayRef<KernelArgument> arguments,
      StreamHandle stream_handle) override {
    if (size.items[0] == 0 || size.items[1] == 0 || size.items[2] == 0) {
      return;
    }
    driver_.errors().check();
    DriverStream& stream = streams_.known(stream_handle);
    DriverKernel& kernel = kernel_of(handle);
    const auto resolved = resolve(arguments);
    if (C10_UNLIKELY(Profile::is_active())) { // which has to know when this command runs, and no other
      const GilReleased released;
      kernel.wait();
    }
    if (C10_LIKELY(kernel.is_built() && !stream.deferred.any())) {
      launch_now(kernel, size, resolved, stream);
      return;
    }
    if (kernel.is_over()) {
      kernel.check();
    }
    stream.throw_failure();
    stream.deferred.submit(
        c10::intrusive_ptr<KernelBuild>::reclaim_copy(&kernel),
        [this, &kernel, &stream, size, kept = DeferredArguments(resolved)]() mutable {
          launch_now(kernel, size, kept.values(), stream);
        });
  }

  std::string queue_api() const override {
    const NativeLauncher* launcher = driver_.launcher();
    return launcher == nullptr ? "" : std::string_view(launcher->api()) == "c" ? properties().driver : launcher->api();
  }

  void call_on_queue(
      std::shared_ptr<const QueueFunction> function, const std::string& caller,
      c10::ArrayRef<KernelArgument> arguments, StreamHandle handle) override {
    if (driver_.launcher() == nullptr) {
      Device::call_on_queue(std::move(function), caller, arguments, handle); // refuses
    }
    driver_.errors().check();
    DriverStream& stream = streams_.known(handle);
    const auto resolved = resolve(arguments);
    if (C10_LIKELY(!stream.deferred.any())) {
      call_now(*function, caller, resolved, stream);
      return;
    }
    stream.throw_failure();
    stream.deferred.submit(
        nullptr, [this, &stream, function = std::move(function), caller, kept = DeferredArguments(resolved)]() mutable {
          call_now(*function, caller, kept.values(), stream);
        });
  }

 private:
  template <typename Function>
  void give_back(const Function& function) {
    if (!Py_IsInitialized()) {
      return; // the process is going, and its memory with it
    }
    DriverCall call;
    const py::error_scope kept; // the caller may be a destructor that runs while an exception is on its way
    // The driver is promised that no work uses the memory; the allocator only knows that no later work will.
    streams_.finish_work();
    function();
  }

  // True where the queue does, in its order.
  bool runs_host_functions() const {
    return driver_.launcher() != nullptr && driver_.launcher()->host_sees_memory();
  }

  void launch_now(
      DriverKernel& kernel, const LaunchSize& size, c10::ArrayRef<LaunchArgument> arguments, DriverStream& stream) {
    const auto doing = [&] { return c10::str("launching ", kernel.name()); };
    if (driver_.launcher() == nullptr) {
      const DriverStreams::Submission submission(streams_, stream);
      const DeviceCall gil(true); // around what catches errors, too
      driver_.errors().watch(doing, [&] { kernel.launch(stream.object, size, arguments, 0); });
      return;
    }
    streams_.natively(stream, doing, [&] { kernel.launch(stream.native, size, arguments, memory_.generation()); });
  }

  c10::SmallVector<LaunchArgument, 24> resolve(c10::ArrayRef<KernelArgument> arguments) const {
    c10::SmallVector<LaunchArgument, 24> resolved;
    for (const KernelArgument& argument : arguments) {
      resolved.push_back(memory_.resolve(argument));
    }
    return resolved;
  }

  void call_now(
      const QueueFunction& function, const std::string& caller, c10::ArrayRef<LaunchArgument> arguments,
      DriverStream& stream) {
    const auto doing = [&] { return c10::str("calling ", function.name(), " for ", caller); };
    streams_.natively(stream, doing, [&] {
      const auto given = c_arguments(arguments);
      const auto call = reinterpret_cast<int (*)(void*, const CArgument*, uint64_t)>(function.address());
      int status = 0;
      {
        const GilReleased released; // a deferred call may come from a thread that has it
        said(
            [&] { status = call(stream.native, given.data(), given.size()); },
            [&] {
              return c10::str("bp:", static_cast<int>(index_), " driver ", function.name(), numbers_of(function, arguments), ", given to the queue");
            });
      }
      if (C10_UNLIKELY(status != 0)) {
        stream.launches.fetch_add(1, std::memory_order_relaxed); // part of its work may be under way
        driver_.errors().fail(doing(), function.name(), status, function.explain(status));
      }
    });
  }

  void copy_natively(void* destination, const void* source, size_t bytes, DriverStream& stream) {
    memory_.place_of(destination, bytes); // checks the ranges
    memory_.place_of(source, bytes);
    const LaunchArgument to = memory_.resolve({destination, 0});
    const LaunchArgument from = memory_.resolve({source, 0});
    streams_.natively_in_order(stream, {"copying ", bytes, " bytes within it"}, [this, &stream, to, from, bytes] {
      driver_.launcher()->copy(stream.native, to, from, bytes);
    });
  }

  const c10::DeviceIndex index_;
  DriverObject driver_;
  DriverMemory memory_;
  DriverStreams streams_;
  const bool discrete_; // the user wants it so: the host must not see the memory
  const bool can_pin_;
};

} // namespace

std::unique_ptr<Device> make_driver_device(
    c10::DeviceIndex index, DeviceProperties properties, py::object device, bool discrete) {
  return std::make_unique<DriverDevice>(index, std::move(properties), std::move(device), discrete);
}

} // namespace backplane
