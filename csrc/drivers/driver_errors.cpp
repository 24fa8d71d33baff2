#include "drivers/driver_errors.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <memory>

#include "devices/device.h"

namespace py = pybind11;

namespace backplane {
namespace {

[[noreturn]] void throw_accelerator_error(int code, std::string text) {
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, code, std::move(text));
}

} // namespace

void DriverErrors::throw_lost() const {
  const Loss& loss = *lost_.load(std::memory_order_acquire);
  throw_accelerator_error(loss.code, loss.text);
}

void DriverErrors::convert(const py::error_already_set& error, const std::string& doing) {
  const auto type = py::module_::import("torch_backplane.drivers.base").attr("DeviceError");
  if (!error.matches(type)) {
    return;
  }
  const auto why = py::str(error.value()).cast<std::string>();
  const auto code = error.value().attr("code").cast<int>();
  if (!error.value().attr("lost").cast<bool>()) {
    throw_accelerator_error(code, c10::str(name_, " failed while ", doing, ": ", why));
  }
  auto loss = std::make_unique<const Loss>(Loss{
      c10::str(
          name_, " was lost while ", doing, ": ", why,
          ". The contents of its tensors are lost, and every use of the device raises this error: restart the process "
          "to use it again. Other devices keep working"),
      code});
  const Loss* none = nullptr;
  if (lost_.compare_exchange_strong(none, loss.get(), std::memory_order_acq_rel)) {
    static_cast<void>(loss.release());
  }
  throw_lost(); // the first loss
}

void DriverErrors::fail(
    const std::string& doing, const std::string& function, int status, const std::string& why) const {
  throw_accelerator_error(
      status,
      c10::str(
          name_, " failed while ", doing, ": ", function, " answered ", status,
          why.empty() ? "" : ", which is: ", why));
}

void DriverErrors::convert(const NativeError& error, py::handle device, const std::string& doing) {
  check(); // another thread can have detected the loss
  const std::string call = error.call + error.details;
  TORCH_CHECK(Py_IsInitialized(), name_, " failed while ", doing, ": ", call, " answered ", error.status);
  DeviceCall gil(true);
  const InsideDriverCall inside;
  try {
    const py::object raised = device.attr("native_error")(call, error.status);
    PyErr_SetObject(py::type::handle_of(raised).ptr(), raised.ptr());
    throw py::error_already_set();
  } catch (const py::error_already_set& raised) {
    convert(raised, doing);
    throw;
  }
}

} // namespace backplane
