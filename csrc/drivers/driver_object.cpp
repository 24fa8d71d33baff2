#include "drivers/driver_object.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <map>

#include "devices/driver_call.h"

namespace py = pybind11;

namespace backplane {
namespace {

thread_local int driver_calls = 0; // active calls of this thread

bool alive() {
  TORCH_CHECK(Py_IsInitialized(), "a bp device of a Python driver was used after Python has been finalized");
  return true;
}

} // namespace

bool inside_driver_call() noexcept {
  return driver_calls > 0;
}

InsideDriverCall::InsideDriverCall() noexcept {
  ++driver_calls;
}

InsideDriverCall::~InsideDriverCall() {
  --driver_calls;
}

DriverCall::DriverCall() : gil_(alive()) {}

DriverObject::DriverObject(c10::DeviceIndex index, std::string name, py::object object)
    : name_(std::move(name)),
      errors_(c10::str("bp:", static_cast<int>(index), " (", name_, ")")),
      object_(std::move(object)) {
  const py::object launcher = attr("native_launcher");
  if (!launcher.is_none()) {
    launcher_ = make_native_launcher(
        launcher.attr("api").cast<std::string>(), launcher.attr("functions").cast<std::map<std::string, uintptr_t>>());
  }
}

void DriverObject::call_quietly(const char* method, py::handle argument) const noexcept {
  if (errors_.is_lost()) {
    return;
  }
  const InsideDriverCall inside;
  PyObject* result = PyObject_CallMethod(object_.ptr(), method, "O", argument.ptr());
  if (result == nullptr && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
    PyErr_Clear();
    PyErr_SetInterrupt(); // interrupts the next Python code
  } else if (result == nullptr) {
    PyErr_WriteUnraisable(object_.ptr());
  }
  Py_XDECREF(result);
}

} // namespace backplane
