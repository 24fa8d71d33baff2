#include <c10/util/StringUtil.h>
#include <pybind11/pybind11.h>

#include "bindings.h"
#include "devices/device.h"
#include "devices/interrupts.h"
#include "streams/stream.h"
#include "streams/sync_watch.h"

namespace py = pybind11;

namespace backplane {
namespace {

// Calls function(what, event, device, stream). `event` is the event's address, which identifies it until "destroyed".
class PythonWatch final : public SyncWatch {
 public:
  explicit PythonWatch(py::object function) : function_(function.release().ptr()) {}

  void recorded(const Event* event, c10::Stream stream) override {
    call("recorded", event, stream.device_index(), stream.id());
  }
  void waits(c10::Stream stream, const Event* event) override {
    call("waits", event, stream.device_index(), stream.id());
  }
  void host_passed(const Event* event) override {
    call("host passed event", event, event->device, 0);
  }
  void host_passed(c10::Stream stream) override {
    call("host passed stream", nullptr, stream.device_index(), stream.id());
  }
  void host_passed(c10::DeviceIndex device) override {
    call("host passed device", nullptr, device, 0);
  }
  void destroyed(const Event* event) override {
    call("destroyed", event, event->device, 0);
  }

 private:
  void call(const char* what, const Event* event, c10::DeviceIndex device, c10::StreamId stream) const {
    if (!Py_IsInitialized()) {
      return;
    }
    const py::gil_scoped_acquire gil;
    const py::error_scope kept; // can be called by a destructor while an error is set
    try {
      py::reinterpret_borrow<py::object>(function_)(
          what, reinterpret_cast<uintptr_t>(event), static_cast<int>(device), stream);
    } catch (py::error_already_set& error) {
      if (!postpone_interrupt(error)) {
        error.discard_as_unraisable("the function of watch_synchronization()");
      }
    }
  }

  PyObject* const function_;
};

void watch_synchronization(const py::object& function) {
  // The previous watch is leaked, because another thread may still use it.
  SyncWatch::set_active(function.is_none() ? nullptr : new PythonWatch(function));
}

} // namespace

void bind_sync_watch(py::module_& module) {
  module.def("watch_synchronization", &watch_synchronization, py::arg("function"));
}

} // namespace backplane
