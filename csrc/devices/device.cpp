#include "devices/device.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#ifndef _WIN32 // which has no fork
#include <pthread.h>
#endif

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "devices/discovery.h"
#include "devices/interrupts.h"

namespace backplane {

// --- defaults of the optional methods ------------------------------------------------------------------------------

void* Device::reserve(size_t) {
  TORCH_CHECK(false, properties_.driver, " devices cannot reserve address space");
}

void Device::unreserve(void*, size_t) {
  TORCH_CHECK(false, properties_.driver, " devices cannot reserve address space");
}

bool Device::map(void*, size_t) {
  TORCH_CHECK(false, properties_.driver, " devices cannot map memory into reserved address space");
}

void Device::unmap(void*, size_t) {
  TORCH_CHECK(false, properties_.driver, " devices cannot map memory into reserved address space");
}

void* Device::pin(void*, size_t) {
  TORCH_CHECK(false, properties_.driver, " devices cannot pin host memory");
}

void Device::unpin(void*) {
  TORCH_CHECK(false, properties_.driver, " devices cannot pin host memory");
}

uintptr_t Device::native_handle(StreamHandle) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, properties_.driver, " devices have no native stream handles");
}

StreamHandle Device::adopt_stream(uintptr_t) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, properties_.driver, " devices cannot adopt streams");
}

bool Device::copy_from_peer(void*, Device&, const void*, size_t, StreamHandle) {
  return false;
}

bool Device::can_access_peer(const Device&) const {
  return false;
}

bool Device::wait_for_peer(Device&, EventHandle, StreamHandle) {
  return false;
}

std::unique_ptr<NativeGraph> Device::instantiate(c10::ArrayRef<GraphCommand>) {
  return nullptr;
}

KernelHandle Device::compile(KernelSource) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, properties_.driver, " devices run no kernels");
}

KernelResources Device::kernel_resources(KernelHandle) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, properties_.driver, " devices run no kernels");
}

void Device::destroy_kernel(KernelHandle) noexcept {}

namespace {

class EventTimer final : public CommandTimer {
 public:
  EventTimer(Device& device, StreamHandle stream) : device_(device), stream_(stream), first_(record()) {}

  ~EventTimer() override {
    for (const EventHandle event : {first_, last_}) {
      if (event != nullptr) {
        device_.destroy_event(event);
      }
    }
  }

  void stop() override {
    last_ = record();
  }

  std::optional<std::pair<double, double>> since(EventHandle base) override {
    if (last_ == nullptr) {
      return std::nullopt;
    }
    device_.synchronize_event(last_);
    return std::pair(device_.elapsed_ms(base, first_), device_.elapsed_ms(base, last_));
  }

 private:
  EventHandle record() const {
    const DeviceCall call(device_);
    const EventHandle event = device_.create_event(/*timing=*/true);
    try {
      device_.submit(EventRecord{event}, stream_);
    } catch (...) {
      device_.destroy_event(event);
      throw;
    }
    return event;
  }

  Device& device_;
  const StreamHandle stream_;
  const EventHandle first_;
  EventHandle last_ = nullptr;
};

} // namespace

std::unique_ptr<CommandTimer> Device::time_commands(StreamHandle stream) {
  return std::make_unique<EventTimer>(*this, stream);
}

void Device::sleep(double, StreamHandle) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, properties_.driver, " devices cannot keep a stream busy for a given time");
}

DeviceCall::DeviceCall(bool needs_gil) {
  // Nothing can be called after Python has been finalized; the adapter checks this before each call.
  if (needs_gil && Py_IsInitialized()) {
    gil_state_ = static_cast<int>(PyGILState_Ensure());
  }
}

DeviceCall::~DeviceCall() {
  if (gil_state_ >= 0) {
    PyGILState_Release(static_cast<PyGILState_STATE>(gil_state_));
  }
}

GilReleased::GilReleased() {
  if (Py_IsInitialized() && PyGILState_Check()) {
    saved_ = PyEval_SaveThread();
  }
}

GilReleased::~GilReleased() {
  if (saved_ != nullptr) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(saved_));
  }
}

// --- the table -------------------------------------------------------------------------------------------------------

namespace {

struct Table {
  std::vector<std::unique_ptr<Device>> devices; // append-only until `ready`, constant afterwards
  std::atomic<bool> ready{false};
  std::atomic<bool> initialized{false};
  std::atomic<bool> forked{false};
  // Set by set_discovery_functions().
  PyObject* discover = nullptr;
  PyObject* initialize = nullptr;
};

// Never destroyed: tensors and threads can outlive static destructors.
Table& table() {
  static Table* instance = new Table;
  return *instance;
}

thread_local c10::DeviceIndex current = 0;

// Marks a forked child in which devices cannot be used. Native devices that were not used before the fork work in both
// processes. Discovering a Python driver's devices counts as a use: it calls the driver's library, whose threads a fork
// does not copy.
[[maybe_unused]] void mark_forked() {
  const Table& known = table();
  const auto is_used = [&](const std::unique_ptr<Device>& device) {
    return device->needs_gil() || known.initialized.load();
  };
  if (known.ready.load() && std::any_of(known.devices.begin(), known.devices.end(), is_used)) {
    table().forked.store(true);
  }
}

// Calls a function of set_discovery_functions(). Several threads can do so at the same time: the Python function takes
// a lock. Python exceptions are rethrown.
void call_python(PyObject* function) {
  TORCH_CHECK(Py_IsInitialized(), "bp devices cannot be discovered after Python has been finalized");
  DeviceCall gil(true);
  TORCH_CHECK(function != nullptr, "bp devices cannot be discovered before torch_backplane is imported");
  PyObject* result = PyObject_CallNoArgs(function);
  if (result == nullptr) {
    throw pybind11::error_already_set();
  }
  Py_DECREF(result);
}

} // namespace

void set_discovery_functions(PyObject* discover, PyObject* initialize) {
#ifndef _WIN32
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, mark_forked); });
#endif
  Py_XINCREF(discover);
  Py_XINCREF(initialize);
  Py_XDECREF(std::exchange(table().discover, discover));
  Py_XDECREF(std::exchange(table().initialize, initialize));
}

void add_device(std::unique_ptr<Device> device) {
  Table& devices = table();
  TORCH_CHECK(!devices.ready.load(), "bp devices can only be added while they are being discovered");
  constexpr size_t kMost = 64; // c10::DeviceIndex is 8 bits, and PyTorch keeps tables of this size
  TORCH_CHECK(devices.devices.size() < kMost, "at most ", kMost, " bp devices are supported");
  devices.devices.push_back(std::move(device));
}

c10::DeviceIndex next_device_index() noexcept {
  return static_cast<c10::DeviceIndex>(table().devices.size());
}

void finish_discovery() {
  table().ready.store(true, std::memory_order_release);
}

bool is_discovered() noexcept {
  return table().ready.load(std::memory_order_acquire);
}

void finish_initialization() {
  table().initialized.store(true, std::memory_order_release);
}

bool is_initialized() noexcept {
  return table().initialized.load(std::memory_order_acquire);
}

bool in_bad_fork() noexcept {
  return table().forked.load(std::memory_order_relaxed);
}

void check_not_forked() {
  TORCH_CHECK(
      !in_bad_fork(),
      "Cannot re-initialize bp in forked subprocess. To use bp with multiprocessing, you must use the 'spawn' start "
      "method");
}

c10::DeviceIndex device_count() noexcept {
  if (C10_UNLIKELY(!is_discovered())) {
    try {
      call_python(table().discover);
    } catch (const std::exception& error) {
      postpone_interrupt(error);
      return 0; // torch.bp.init() reports the reason
    }
  }
  return in_bad_fork() ? 0 : static_cast<c10::DeviceIndex>(table().devices.size());
}

void ensure_initialized() {
  check_not_forked();
  if (!is_initialized()) {
    call_python(table().initialize);
  }
}

c10::DeviceIndex checked_index(c10::DeviceIndex index) {
  if (C10_UNLIKELY(!is_initialized() || in_bad_fork())) {
    ensure_initialized();
  }
  const auto count = static_cast<c10::DeviceIndex>(table().devices.size());
  if (index == -1) {
    index = current;
  }
  TORCH_CHECK(
      index >= 0 && index < count, "bp error: invalid device ordinal: bp:", static_cast<int>(index), ", but there ",
      count == 1 ? "is 1 device (bp:0)"
                 : c10::str("are ", static_cast<int>(count), " devices (bp:0 to bp:", count - 1, ")"));
  return index;
}

Device& device(c10::DeviceIndex index) {
  return *table().devices[checked_index(index)];
}

c10::DeviceIndex current_device() {
  return current;
}

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0, "bp device index must be >= 0, but got ", static_cast<int>(index));
  current = checked_index(index);
}

void set_current_device_unchecked(c10::DeviceIndex index) noexcept {
  current = index;
}

c10::DeviceIndex exchange_current_device(c10::DeviceIndex index) {
  const auto previous = current;
  if (index != previous) {
    set_current_device(index);
  }
  return previous;
}

} // namespace backplane
