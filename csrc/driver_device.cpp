#include "driver_device.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <map>

namespace py = pybind11;

namespace backplane {
namespace {

bool alive() {
  TORCH_CHECK(Py_IsInitialized(), "a bp device of a Python driver was used after Python has been finalized");
  return true;
}

} // namespace

DriverCall::DriverCall() : gil_(alive()) {}

DriverDevice::DriverDevice(c10::DeviceIndex index, std::string name, py::object object)
    : name_(std::move(name)),
      errors_(c10::str("bp:", static_cast<int>(index), " (", name_, ")")),
      object_(std::move(object)) {
  const py::object launcher = attr("native_launcher");
  if (!launcher.is_none()) {
    launcher_ = make_native_launcher(
        launcher.attr("api").cast<std::string>(), launcher.attr("functions").cast<std::map<std::string, uintptr_t>>());
  }
}

void DriverDevice::call_quietly(const char* method, py::handle argument) const noexcept {
  if (errors_.is_lost()) {
    return;
  }
  PyObject* result = PyObject_CallMethod(object_.ptr(), method, "O", argument.ptr());
  if (result == nullptr) {
    PyErr_WriteUnraisable(object_.ptr());
  }
  Py_XDECREF(result);
}

} // namespace backplane
