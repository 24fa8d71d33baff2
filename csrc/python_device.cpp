#include "python_device.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <unordered_set>

#include "address_space.h"

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

py::handle object(void* handle) {
  return static_cast<PyObject*>(handle);
}

// Every handle of the driver's (segment, stream, event) is a Python object that the socket keeps one reference to. The
// calls run Python code, which may hand the GIL to another thread: no lock of ours is held around them.
class PythonDevice final : public Device {
 public:
  PythonDevice(DeviceProperties properties, py::object device)
      : Device(std::move(properties)), device_(std::move(device)) {}

  bool needs_gil() const override {
    return true;
  }

  // --- memory
  void* allocate(size_t bytes) override {
    Call call;
    if (!take(bytes)) {
      return nullptr;
    }
    try {
      return place(device_.attr("allocate")(bytes), bytes);
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
    const auto handle = py::reinterpret_steal<py::object>(object(segments_.remove(address)));
    if (!properties().host_accessible) {
      AddressSpace::release(address, bytes);
    }
    allocated_ -= bytes;
    device_.attr("free")(handle);
  }

  std::pair<size_t, size_t> memory_info() override {
    Call call;
    const py::object info = device_.attr("memory_info")();
    if (!info.is_none()) {
      return info.cast<std::pair<size_t, size_t>>();
    }
    const size_t total = properties().total_memory;
    return {total - std::min<size_t>(allocated_, total), total};
  }

  // --- streams
  StreamHandle create_stream(int priority) override {
    Call call;
    PyObject* stream = device_.attr("create_stream")(priority).release().ptr();
    streams_.insert(stream);
    return stream;
  }

  void destroy_stream(StreamHandle stream) noexcept override {
    destroy("destroy_stream", stream);
  }

  bool query_stream(StreamHandle stream) override {
    Call call;
    return device_.attr("query_stream")(known(stream)).cast<bool>();
  }

  void synchronize_stream(StreamHandle stream) override {
    Call call;
    device_.attr("synchronize_stream")(known(stream));
  }

  // --- events
  EventHandle create_event(bool timing) override {
    Call call;
    return device_.attr("create_event")(timing).release().ptr();
  }

  void destroy_event(EventHandle event) noexcept override {
    destroy("destroy_event", event);
  }

  void record_event(EventHandle event, StreamHandle stream) override {
    Call call;
    device_.attr("record_event")(object(event), known(stream));
  }

  void wait_event(EventHandle event, StreamHandle stream) override {
    Call call;
    device_.attr("wait_event")(object(event), known(stream));
  }

  bool query_event(EventHandle event) override {
    Call call;
    return device_.attr("query_event")(object(event)).cast<bool>();
  }

  void synchronize_event(EventHandle event) override {
    Call call;
    device_.attr("synchronize_event")(object(event));
  }

  double elapsed_ms(EventHandle start, EventHandle end) override {
    Call call;
    return device_.attr("elapsed_ms")(object(start), object(end)).cast<double>();
  }

  // --- transfers
  void copy(void* destination, const void* source, size_t bytes, CopyKind kind, StreamHandle stream) override {
    if (bytes == 0) {
      return;
    }
    Call call;
    if (kind == CopyKind::HostToDevice) {
      const auto [handle, offset] = resolve(destination, bytes);
      device_.attr("copy_in")(object(handle), offset, read_only(source, bytes), known(stream));
    } else if (kind == CopyKind::DeviceToHost) {
      const auto [handle, offset] = resolve(source, bytes);
      device_.attr("copy_out")(object(handle), offset, writable(destination, bytes), known(stream));
    } else {
      const auto to = resolve(destination, bytes);
      const auto from = resolve(source, bytes);
      device_.attr("copy")(
          object(to.handle), to.offset, object(from.handle), from.offset, bytes, known(stream));
    }
  }

  void fill(void* address, uint8_t value, size_t bytes, StreamHandle stream) override {
    if (bytes == 0) {
      return;
    }
    Call call;
    const auto [handle, offset] = resolve(address, bytes);
    device_.attr("fill")(object(handle), offset, bytes, value, known(stream));
  }

  bool copy_from_peer(void* destination, Device& peer, const void* source, size_t bytes, StreamHandle stream) override {
    auto* other = dynamic_cast<PythonDevice*>(&peer);
    if (other == nullptr) {
      return false;
    }
    if (bytes == 0) {
      return true;
    }
    Call call;
    const auto to = resolve(destination, bytes);
    const auto from = other->resolve(source, bytes);
    return device_
        .attr("copy_from_peer")(
            object(to.handle), to.offset, other->device_, object(from.handle), from.offset, bytes, known(stream))
        .cast<bool>();
  }

  bool can_access_peer(const Device& peer) const override {
    const auto* other = dynamic_cast<const PythonDevice*>(&peer);
    if (other == nullptr) {
      return false;
    }
    Call call;
    return device_.attr("can_access_peer")(other->device_).cast<bool>();
  }

  void sleep(double milliseconds, StreamHandle stream) override {
    Call call;
    device_.attr("sleep")(milliseconds, known(stream));
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
    segments_.insert(address, bytes, handle.release().ptr());
    return address;
  }

  AddressSpace::Place resolve(const void* address, size_t bytes) const {
    return segments_.resolve(address, bytes, properties().name.c_str());
  }

  // torch.bp.ExternalStream takes any number; a wrong one must not be followed.
  py::handle known(StreamHandle stream) const {
    TORCH_CHECK(
        streams_.count(stream) != 0, stream, " is not a stream of ", properties().name,
        ": streams of a Python driver are made by torch.bp.Stream only");
    return object(stream);
  }

  // Callers are destructors, which cannot pass an error on: it is printed, as Python does with errors in __del__.
  void destroy(const char* method, void* handle) noexcept {
    if (!Py_IsInitialized()) {
      return;
    }
    DeviceCall gil(true);
    const py::error_scope kept;
    streams_.erase(handle);
    PyObject* result = PyObject_CallMethod(device_.ptr(), method, "O", static_cast<PyObject*>(handle));
    if (result == nullptr) {
      PyErr_WriteUnraisable(device_.ptr());
    }
    Py_XDECREF(result);
    Py_DECREF(static_cast<PyObject*>(handle));
  }

  const py::object device_;
  AddressSpace segments_; // where each segment's Python object is
  std::atomic<size_t> allocated_{0};
  std::unordered_set<void*> streams_; // guarded by the GIL
};

} // namespace

std::unique_ptr<Device> make_python_device(DeviceProperties properties, py::object device) {
  return std::make_unique<PythonDevice>(std::move(properties), std::move(device));
}

} // namespace backplane
