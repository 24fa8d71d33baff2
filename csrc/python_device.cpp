#include "python_device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <pybind11/stl.h>

#include <atomic>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "address_space.h"
#include "driver_errors.h"
#include "python_kernel.h"

namespace py = pybind11;

namespace backplane {
namespace {

constexpr size_t kAlignment = 512; // of device addresses, see Device::allocate

// The GIL, for one call into the driver. Throws once Python has been finalized: nobody is left to be called.
class Call {
 public:
  Call() : gil_(alive()) {}

 private:
  static bool alive() {
    TORCH_CHECK(Py_IsInitialized(), "a bp device of a Python driver was used after Python has been finalized");
    return true;
  }

  DeviceCall gil_;
};

py::memoryview read_only(const void* memory, size_t bytes) {
  return py::memoryview::from_memory(memory, static_cast<py::ssize_t>(bytes));
}

py::memoryview writable(void* memory, size_t bytes) {
  return py::memoryview::from_memory(memory, static_cast<py::ssize_t>(bytes), /*readonly=*/false);
}

// For callers that are destructors, which cannot pass an error on: it is printed, as Python does with errors in __del__.
// The driver of a lost device is left alone.
void call_quietly(py::handle device, const DriverErrors& errors, const char* method, PyObject* argument) {
  if (errors.is_lost()) {
    return;
  }
  PyObject* result = PyObject_CallMethod(device.ptr(), method, "O", argument);
  if (result == nullptr) {
    PyErr_WriteUnraisable(device.ptr());
  }
  Py_XDECREF(result);
}

// What the driver calls a segment, and what its hardware API does; the latter only with a native launcher.
struct Segment {
  PyObject* object;
  void* native = nullptr;
};

struct PythonStream {
  PyObject* object;
  void* native = nullptr;
  DeferredCommands deferred;
  std::atomic<uint64_t> launches{0}; // native ones, which the driver does not see
  std::atomic<uint64_t> noted{0}; // how many of them it was told of
};

using StreamPointer = std::shared_ptr<PythonStream>;

// An event, and its recordings that are still deferred. Kept by those, so that it may be destroyed before.
class PythonEvent : public c10::intrusive_ptr_target {
 public:
  PythonEvent(py::handle device, const DriverErrors& errors, py::object event)
      : device_(device), errors_(errors), object_(event.release().ptr()) {}

  ~PythonEvent() override {
    if (!Py_IsInitialized()) {
      return;
    }
    DeviceCall gil(true);
    const py::error_scope kept;
    call_quietly(device_, errors_, "destroy_event", object_);
    Py_DECREF(object_);
  }

  py::handle object() const {
    return object_;
  }

  // The stream of the latest recording that was deferred; null if there has been none.
  StreamPointer stream() const {
    std::lock_guard<std::mutex> guard(lock_);
    return stream_;
  }

  bool is_deferred() const {
    return deferred_.load() > 0;
  }

  void defer(StreamPointer stream) {
    std::lock_guard<std::mutex> guard(lock_);
    stream_ = std::move(stream);
    ++deferred_;
  }

  void recorded() {
    --deferred_;
  }

 private:
  const py::handle device_;
  const DriverErrors& errors_;
  PyObject* const object_;
  mutable std::mutex lock_;
  StreamPointer stream_;
  std::atomic<int> deferred_{0}; // recordings
};

PythonEvent& event_of(EventHandle event) {
  return *static_cast<PythonEvent*>(event);
}

PythonKernel& kernel_of(KernelHandle kernel) {
  return *static_cast<PythonKernel*>(kernel);
}

constexpr size_t kParallelCopy = 1 << 20; // bytes
constexpr uint64_t kFlushEvery = 16; // native launches: the device should not idle because nobody synchronizes

// Every handle of the driver's (segment, stream, event) is a Python object that the socket keeps one reference to. The
// calls run Python code, which may hand the GIL to another thread: no lock of ours is held around them.
//
// While a stream has commands that wait for a kernel to be built (kernel_build.h), what comes after is deferred too, if
// it returns nothing; the other calls wait.
class PythonDevice final : public Device {
 public:
  PythonDevice(c10::DeviceIndex index, DeviceProperties given, py::object device, bool discrete)
      : Device(std::move(given)),
        errors_(c10::str("bp:", static_cast<int>(index), " (", properties().name, ")")),
        device_(std::move(device)),
        discrete_(discrete) {
    const py::object launcher = device_.attr("native_launcher");
    if (!launcher.is_none()) {
      launcher_ = make_native_launcher(
          launcher.attr("api").cast<std::string>(),
          launcher.attr("functions").cast<std::map<std::string, uintptr_t>>());
    }
  }

  bool needs_gil() const override {
    return true;
  }

  bool is_lost() const noexcept override {
    return errors_.is_lost();
  }

  void check_not_lost() const override {
    errors_.check();
  }

  // --- memory
  void* allocate(size_t bytes) override {
    Call call;
    if (!take(bytes)) {
      return nullptr;
    }
    try {
      return errors_.watch(
          [&] { return c10::str("allocating ", bytes, " bytes"); },
          [&] { return place(device_.attr("allocate")(bytes), bytes); });
    } catch (py::error_already_set& error) {
      allocated_ -= bytes;
      if (error.matches(PyExc_MemoryError)) {
        return nullptr;
      }
      throw;
    } catch (...) {
      allocated_ -= bytes;
      throw;
    }
  }

  void free(void* address, size_t bytes) override {
    if (!Py_IsInitialized()) {
      return; // the process is going, and its memory with it
    }
    Call call;
    const py::error_scope kept; // the caller may be a destructor that runs while an exception is on its way
    // The driver is promised that no work uses the segment; the allocator only knows that no later work will. What a
    // stream fails with is raised where somebody waits for it.
    for (const StreamPointer& stream : streams()) {
      stream->deferred.submit(nullptr, [this, &stream] { synchronize(*stream); });
      stream->deferred.issue_all();
    }
    const std::unique_ptr<Segment> segment(static_cast<Segment*>(segments_.remove(address)));
    const auto handle = py::reinterpret_steal<py::object>(segment->object);
    if (!properties().host_accessible) {
      AddressSpace::release(address, bytes);
    }
    allocated_ -= bytes;
    if (is_lost()) {
      return;
    }
    try {
      ask("freeing memory", [&] { device_.attr("free")(handle); });
    } catch (const c10::AcceleratorError&) {
      if (!is_lost()) {
        throw;
      }
    }
  }

  std::pair<size_t, size_t> memory_info() override {
    return ask("asked for its free memory", [&]() -> std::pair<size_t, size_t> {
      const py::object info = device_.attr("memory_info")();
      if (!info.is_none()) {
        return info.cast<std::pair<size_t, size_t>>();
      }
      const size_t total = properties().total_memory;
      return {total - std::min<size_t>(allocated_, total), total};
    });
  }

  // --- streams
  StreamHandle create_stream(int priority) override {
    auto stream = std::make_shared<PythonStream>();
    ask("making a stream", [&] {
      py::object object = device_.attr("create_stream")(priority);
      if (launcher_ != nullptr) {
        stream->native = pointer(device_.attr("native_stream")(object));
      }
      stream->object = object.release().ptr();
    });
    std::unique_lock<std::shared_mutex> guard(streams_lock_);
    return streams_.emplace(stream.get(), stream).first->first;
  }

  void destroy_stream(StreamHandle handle) noexcept override {
    if (!Py_IsInitialized()) {
      return;
    }
    DeviceCall gil(true);
    const py::error_scope kept;
    StreamPointer stream = shared(handle);
    stream->deferred.issue_all();
    {
      std::unique_lock<std::shared_mutex> guard(streams_lock_);
      streams_.erase(handle);
      ++streams_removed_;
    }
    call_quietly(device_, errors_, "destroy_stream", stream->object);
    Py_DECREF(stream->object);
  }

  bool query_stream(StreamHandle handle) override {
    PythonStream& stream = known(handle);
    if (stream.deferred.any()) {
      stream.deferred.issue_ready();
      stream.deferred.rethrow();
      if (stream.deferred.is_waiting()) {
        return false;
      }
    }
    return ask("asked whether a stream is done", [&] {
      note_launches(stream);
      return device_.attr("query_stream")(py::handle(stream.object)).cast<bool>();
    });
  }

  void synchronize_stream(StreamHandle handle) override {
    PythonStream& stream = known(handle);
    stream.deferred.issue_all();
    synchronize(stream);
    throw_failure(stream);
  }

  // --- events
  EventHandle create_event(bool timing) override {
    return ask("making an event", [&]() -> EventHandle {
      return c10::make_intrusive<PythonEvent>(device_, errors_, device_.attr("create_event")(timing)).release();
    });
  }

  void destroy_event(EventHandle event) noexcept override {
    c10::intrusive_ptr<PythonEvent>::reclaim(&event_of(event));
  }

  void record_event(EventHandle handle, StreamHandle stream_handle) override {
    PythonStream& stream = known(stream_handle);
    PythonEvent& event = event_of(handle);
    const auto record = [this, &stream](PythonEvent& recorded) {
      ask("recording an event", [&] { device_.attr("record_event")(recorded.object(), py::handle(stream.object)); });
    };
    if (!stream.deferred.any()) {
      record(event);
      return;
    }
    event.defer(shared(stream_handle));
    stream.deferred.submit(nullptr, [record, kept = c10::intrusive_ptr<PythonEvent>::reclaim_copy(&event)] {
      const auto done = c10::make_scope_exit([&] { kept->recorded(); });
      record(*kept);
    });
  }

  void wait_event(EventHandle event, StreamHandle handle) override {
    PythonStream& stream = known(handle);
    issue_recording(event);
    stream.deferred.issue_all(); // the event may be recorded again, and this means the recording of now
    throw_failure(stream);
    ask("making a stream wait for an event", [&] {
      device_.attr("wait_event")(event_of(event).object(), py::handle(stream.object));
    });
  }

  bool query_event(EventHandle event) override {
    errors_.check();
    if (event_of(event).is_deferred()) {
      event_of(event).stream()->deferred.issue_ready();
      if (event_of(event).is_deferred()) {
        return false;
      }
    }
    return ask("asked for an event", [&] {
      return device_.attr("query_event")(event_of(event).object()).cast<bool>();
    });
  }

  void synchronize_event(EventHandle event) override {
    issue_recording(event);
    ask("waiting for an event", [&] { device_.attr("synchronize_event")(event_of(event).object()); });
    if (const StreamPointer stream = event_of(event).stream()) {
      throw_failure(*stream);
    }
  }

  double elapsed_ms(EventHandle start, EventHandle end) override {
    issue_recording(start);
    issue_recording(end);
    return ask("asked for the time between events", [&] {
      return device_.attr("elapsed_ms")(event_of(start).object(), event_of(end).object()).cast<double>();
    });
  }

  // --- transfers
  void copy(void* destination, const void* source, size_t bytes, CopyKind kind, StreamHandle handle) override {
    if (bytes == 0) {
      return;
    }
    PythonStream& stream = known(handle);
    const py::handle queue = stream.object;
    if (kind == CopyKind::HostToDevice) {
      const auto to = place_of(destination, bytes);
      in_order(stream, {"copying ", bytes, " bytes to it"}, [this, to, source, bytes, queue] {
        device_.attr("copy_in")(to.object, to.offset, read_only(source, bytes), queue);
      });
    } else if (kind == CopyKind::DeviceToHost) {
      const auto from = place_of(source, bytes);
      in_order(stream, {"copying ", bytes, " bytes from it"}, [this, from, destination, bytes, queue] {
        device_.attr("copy_out")(from.object, from.offset, writable(destination, bytes), queue);
      });
    } else if (launcher_ != nullptr && !overlap(destination, source, bytes)) {
      copy_natively(destination, source, bytes, stream);
    } else {
      const auto to = place_of(destination, bytes);
      const auto from = place_of(source, bytes);
      in_order(stream, {"copying ", bytes, " bytes within it"}, [this, to, from, bytes, queue] {
        device_.attr("copy")(to.object, to.offset, from.object, from.offset, bytes, queue);
      });
    }
  }

  void fill(void* address, uint8_t value, size_t bytes, StreamHandle handle) override {
    if (bytes == 0) {
      return;
    }
    PythonStream& stream = known(handle);
    const auto to = place_of(address, bytes);
    if (launcher_ != nullptr) {
      natively_in_order(stream, {"filling ", bytes, " bytes"}, [this, &stream, to = resolve({address, 0}), value, bytes] {
        launcher_->fill(stream.native, to, value, bytes);
      });
      return;
    }
    in_order(stream, {"filling ", bytes, " bytes"}, [this, to, bytes, value, queue = py::handle(stream.object)] {
      device_.attr("fill")(to.object, to.offset, bytes, value, queue);
    });
  }

  bool copy_from_peer(void* destination, Device& peer, const void* source, size_t bytes, StreamHandle handle) override {
    auto* other = dynamic_cast<PythonDevice*>(&peer);
    if (other == nullptr) {
      return false;
    }
    if (bytes == 0) {
      return true;
    }
    PythonStream& stream = known(handle);
    stream.deferred.issue_all();
    throw_failure(stream);
    const auto to = place_of(destination, bytes);
    const auto from = other->place_of(source, bytes);
    return ask("copying from another device", [&] {
      return device_
          .attr("copy_from_peer")(
              to.object, to.offset, other->device_, from.object, from.offset, bytes, py::handle(stream.object))
          .cast<bool>();
    });
  }

  bool can_access_peer(const Device& peer) const override {
    const auto* other = dynamic_cast<const PythonDevice*>(&peer);
    if (other == nullptr) {
      return false;
    }
    Call call;
    return device_.attr("can_access_peer")(other->device_).cast<bool>();
  }

  // --- the host's part
  bool host_sees_memory() const override {
    return properties().host_accessible || (launcher_ != nullptr && launcher_->host_sees_memory() && !discrete_);
  }

  void call_host(HostFunction function, c10::ArrayRef<char*> memory, StreamHandle handle) override {
    TORCH_CHECK(memory.empty() || host_sees_memory(), "the host does not see the memory of ", properties().name);
    PythonStream& stream = known(handle);
    if (launcher_ == nullptr || !launcher_->host_sees_memory()) {
      synchronize_stream(handle);
      function(memory.data());
      return;
    }
    std::vector<LaunchArgument> resolved;
    for (const char* address : memory) {
      resolved.push_back(resolve({address, 0}));
    }
    natively_in_order(
        stream, {"calling a function of the host"},
        [this, &stream, function = std::move(function), resolved = std::move(resolved)] {
          launcher_->call_host(stream.native, function, resolved, segments_.generation());
        });
  }

  void sleep(double milliseconds, StreamHandle handle) override {
    PythonStream& stream = known(handle);
    in_order(stream, {"keeping a stream busy"}, [this, milliseconds, queue = py::handle(stream.object)] {
      device_.attr("sleep")(milliseconds, queue);
    });
  }

  // --- kernels
  KernelHandle compile(const std::string& text, const std::string& entry, const std::string& operator_name) override {
    if (properties().dialect.empty()) {
      return Device::compile(text, entry, operator_name); // refuses
    }
    errors_.check();
    Call call;
    auto kernel = c10::make_intrusive<PythonKernel>(
        PythonKernel::Source{text, entry, operator_name}, device_, properties().name, errors_, launcher_.get(),
        [this] { issue_ready(); });
    const py::cpp_function run([kernel] {
      const GilReleased released;
      kernel->run();
    });
    py::module_::import("torch_backplane.drivers.builds").attr("submit")(run);
    return kernel.release();
  }

  void destroy_kernel(KernelHandle kernel) noexcept override {
    c10::intrusive_ptr<PythonKernel>::reclaim(&kernel_of(kernel)); // deferred launches keep theirs
  }

  void launch(
      KernelHandle handle, const LaunchSize& size, c10::ArrayRef<KernelArgument> arguments,
      StreamHandle stream_handle) override {
    if (size.items[0] == 0 || size.items[1] == 0 || size.items[2] == 0) {
      return;
    }
    errors_.check();
    PythonStream& stream = known(stream_handle);
    PythonKernel& kernel = kernel_of(handle);
    c10::SmallVector<LaunchArgument, 24> resolved;
    for (const KernelArgument& argument : arguments) {
      resolved.push_back(resolve(argument));
    }
    if (C10_LIKELY(kernel.is_built() && !stream.deferred.any())) {
      launch_now(kernel, size, resolved, stream);
      return;
    }
    if (kernel.is_over()) {
      kernel.check();
    }
    throw_failure(stream);
    stream.deferred.submit(
        c10::intrusive_ptr<KernelBuild>::reclaim_copy(&kernel),
        [this, &kernel, &stream, size, kept = DeferredArguments(resolved)]() mutable {
          launch_now(kernel, size, kept.values(), stream);
        });
  }

 private:
  // No driver is asked for more than the device has.
  bool take(size_t bytes) {
    size_t used = allocated_;
    do {
      if (bytes > properties().total_memory - std::min<size_t>(used, properties().total_memory)) {
        return false;
      }
    } while (!allocated_.compare_exchange_weak(used, used + bytes));
    return true;
  }

  // The address of a fresh segment.
  void* place(py::object handle, size_t bytes) {
    void* address = nullptr;
    if (properties().host_accessible) {
      const auto value = device_.attr("address")(handle).cast<uintptr_t>();
      TORCH_CHECK(
          value != 0 && value % kAlignment == 0, "driver ", properties().driver, ": address() returned ", value,
          ", and segments start at multiples of ", kAlignment);
      address = reinterpret_cast<void*>(value);
    } else {
      address = AddressSpace::reserve(bytes);
    }
    auto segment = std::make_unique<Segment>();
    if (launcher_ != nullptr) {
      segment->native = pointer(device_.attr("native_segment")(handle));
    }
    segment->object = handle.release().ptr();
    segments_.insert(address, bytes, segment.release());
    return address;
  }

  struct Place {
    py::handle object;
    size_t offset;
  };

  Place place_of(const void* address, size_t bytes) const {
    const auto [segment, offset] = segments_.resolve(address, bytes, properties().name.c_str());
    return {static_cast<Segment*>(segment)->object, offset};
  }

  LaunchArgument resolve(const KernelArgument& argument) const {
    if (argument.bytes > 0 || argument.data == nullptr) {
      return {nullptr, 0, argument.data, argument.bytes};
    }
    const auto [segment, offset] = segments_.resolve(argument.data, 1, properties().name.c_str());
    const auto* memory = static_cast<Segment*>(segment);
    return {launcher_ != nullptr ? memory->native : memory->object, offset, nullptr, 0};
  }

  // --- streams
  // torch.bp.ExternalStream takes any number; a wrong one must not be followed. Each thread remembers the last good
  // one.
  PythonStream& known(StreamHandle stream) const {
    struct Last {
      const PythonDevice* device;
      StreamHandle stream;
      uint64_t removed;
    };
    thread_local Last last{};
    const Last now{this, stream, streams_removed_.load(std::memory_order_acquire)};
    if (C10_UNLIKELY(last.stream != stream || last.device != this || last.removed != now.removed)) {
      std::shared_lock<std::shared_mutex> guard(streams_lock_);
      TORCH_CHECK(
          streams_.count(stream) != 0, stream, " is not a stream of ", properties().name,
          ": streams of a Python driver are made by torch.bp.Stream only");
      last = now;
    }
    return *static_cast<PythonStream*>(stream);
  }

  StreamPointer shared(StreamHandle stream) const {
    std::shared_lock<std::shared_mutex> guard(streams_lock_);
    return streams_.at(stream);
  }

  std::vector<StreamPointer> streams() const {
    std::shared_lock<std::shared_mutex> guard(streams_lock_);
    std::vector<StreamPointer> all;
    for (const auto& [handle, stream] : streams_) {
      all.push_back(stream);
    }
    return all;
  }

  // What the driver is doing, for messages; only put together where it is needed.
  struct Doing {
    const char* what;
    size_t bytes = 0;
    const char* rest = "";

    std::string operator()() const {
      return bytes > 0 ? c10::str(what, bytes, rest) : what;
    }
  };

  // Calls the driver.
  template <typename Function>
  std::invoke_result_t<Function> ask(const Doing& doing, const Function& function) {
    errors_.check(); // before Python is asked for the GIL
    Call call;
    return errors_.watch(doing, function);
  }

  template <typename Function>
  std::invoke_result_t<Function> ask(const char* doing, const Function& function) {
    return ask(Doing{doing}, function);
  }

  // Calls the driver now, or when the commands in front have been given to it.
  template <typename Command>
  void in_order(PythonStream& stream, const Doing& doing, Command command) {
    if (stream.deferred.any()) {
      throw_failure(stream);
      stream.deferred.submit(nullptr, [this, doing, command] { ask(doing, command); });
      return;
    }
    ask(doing, command);
  }

  // Waits for what the driver was given.
  void synchronize(PythonStream& stream) {
    ask("waiting for a stream", [&] {
      note_launches(stream);
      device_.attr("synchronize_stream")(py::handle(stream.object));
    });
  }

  void throw_failure(PythonStream& stream) {
    if (C10_UNLIKELY(stream.deferred.any())) {
      stream.deferred.rethrow();
    }
  }

  // Makes sure that the driver has got the event's latest recording.
  void issue_recording(EventHandle event) {
    if (event_of(event).is_deferred()) {
      event_of(event).stream()->deferred.issue_all();
    }
  }

  // --- kernels
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

  void launch_now(
      PythonKernel& kernel, const LaunchSize& size, c10::ArrayRef<LaunchArgument> arguments, PythonStream& stream) {
    const auto doing = [&] { return c10::str("launching ", kernel.name()); };
    if (launcher_ == nullptr) {
      const DeviceCall gil(true); // around what catches errors, too
      errors_.watch(doing, [&] { kernel.launch(stream.object, size, arguments, 0); });
      return;
    }
    natively(stream, doing, [&] { kernel.launch(stream.native, size, arguments, segments_.generation()); });
  }

  static bool overlap(const void* one, const void* other, size_t bytes) {
    const auto* first = std::min(static_cast<const char*>(one), static_cast<const char*>(other));
    const auto* second = std::max(static_cast<const char*>(one), static_cast<const char*>(other));
    return static_cast<size_t>(second - first) < bytes;
  }

  void copy_natively(void* destination, const void* source, size_t bytes, PythonStream& stream) {
    place_of(destination, bytes); // checks the ranges
    place_of(source, bytes);
    const LaunchArgument to = resolve({destination, 0});
    const LaunchArgument from = resolve({source, 0});
    const Doing doing{"copying ", bytes, " bytes within it"};
    if (bytes >= kParallelCopy && host_sees_memory()) {
      // One thread of an OpenCL processor copies, where all of the host's can.
      natively_in_order(stream, doing, [this, &stream, to, from, bytes] {
        const HostFunction work = [bytes](char* const* memory) {
          const at::AutoDispatchBelowADInplaceOrView guard;
          const auto tensor = [&](char* start) { return at::from_blob(start, static_cast<int64_t>(bytes), at::kByte); };
          tensor(memory[0]).copy_(tensor(memory[1]));
        };
        launcher_->call_host(stream.native, work, {to, from}, segments_.generation());
      });
      return;
    }
    natively_in_order(stream, doing, [this, &stream, to, from, bytes] {
      launcher_->copy(stream.native, to, from, bytes);
    });
  }

  // As in_order, for commands that go past the driver.
  template <typename Command>
  void natively_in_order(PythonStream& stream, const Doing& doing, Command command) {
    const auto go = [this, &stream, doing, command = std::move(command)] { natively(stream, doing, command); };
    if (C10_LIKELY(!stream.deferred.any())) {
      go();
      return;
    }
    throw_failure(stream);
    stream.deferred.submit(nullptr, go);
  }

  // Gives the queue something that the driver does not see; `doing` says what, for errors.
  template <typename Text, typename Command>
  void natively(PythonStream& stream, const Text& doing, const Command& command) {
    errors_.check();
    try {
      command();
      if (stream.launches.fetch_add(1, std::memory_order_relaxed) % kFlushEvery == 0) {
        launcher_->flush(stream.native);
      }
    } catch (const NativeError& error) {
      errors_.convert(error, device_, doing());
    }
  }

  // Tells the driver, which counts what is under way, of launches that went past it.
  void note_launches(PythonStream& stream) {
    const uint64_t launches = stream.launches.load();
    if (launcher_ != nullptr && stream.noted.exchange(launches) != launches) {
      device_.attr("launched_natively")(py::handle(stream.object));
    }
  }

  // A build is over: gives the driver what waited for it.
  void issue_ready() noexcept {
    for (const StreamPointer& stream : streams()) {
      stream->deferred.issue_ready();
    }
  }

  static void* pointer(const py::object& number) {
    return reinterpret_cast<void*>(number.cast<uintptr_t>());
  }

  DriverErrors errors_;
  const py::object device_;
  const bool discrete_; // the user wants it so: the host must not see the memory
  std::unique_ptr<NativeLauncher> launcher_; // null: the driver's own launch() is called
  AddressSpace segments_; // where each Segment is
  std::atomic<size_t> allocated_{0};
  mutable std::shared_mutex streams_lock_; // never held while the driver is called
  std::unordered_map<void*, StreamPointer> streams_;
  std::atomic<uint64_t> streams_removed_{0};
};

} // namespace

std::unique_ptr<Device> make_python_device(
    c10::DeviceIndex index, DeviceProperties properties, py::object device, bool discrete) {
  return std::make_unique<PythonDevice>(index, std::move(properties), std::move(device), discrete);
}

} // namespace backplane
