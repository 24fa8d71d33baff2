// The Python object of a driver's device, and calls of its methods.
#pragma once

#include <c10/util/StringUtil.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <type_traits>

#include "devices/device.h"
#include "devices/without_dynamo.h"
#include "drivers/driver_errors.h"
#include "drivers/native_launcher.h"

namespace backplane {

// Holds the GIL for a call into a driver. The constructor throws after Python has been finalized.
class DriverCall {
 public:
  DriverCall();

 private:
  DeviceCall gil_;
  WithoutDynamo unseen_;
};

// Describes an operation of the driver, for messages. The text is only built when an error needs it.
struct Doing {
  const char* what;
  size_t bytes = 0;
  const char* rest = "";

  std::string operator()() const {
    return bytes > 0 ? c10::str(what, bytes, rest) : what;
  }
};

// The calls run Python code, which can pass the GIL to another thread, so the runtime must hold no lock during a call.
class DriverObject {
 public:
  // `index`: the index that the device will have. `name`: the name of the hardware. Gets the driver's native launcher.
  DriverObject(c10::DeviceIndex index, std::string name, pybind11::object object);

  const std::string& name() const noexcept {
    return name_;
  }

  DriverErrors& errors() noexcept {
    return errors_;
  }
  const DriverErrors& errors() const noexcept {
    return errors_;
  }
  pybind11::handle object() const noexcept {
    return object_;
  }
  // Null if there is none: kernels are launched with the driver's launch().
  const NativeLauncher* launcher() const noexcept {
    return launcher_.get();
  }
  // A method or another attribute of the driver's device. The caller holds the GIL.
  auto attr(const char* name) const {
    return object_.attr(name);
  }

  // Takes the GIL, calls the driver and converts its errors.
  template <typename Function>
  std::invoke_result_t<Function> ask(const Doing& doing, const Function& function) {
    errors_.check(); // a lost device must not wait for the GIL
    DriverCall call;
    return errors_.watch(doing, function);
  }
  template <typename Function>
  std::invoke_result_t<Function> ask(const char* doing, const Function& function) {
    return ask(Doing{doing}, function);
  }

  // For destructors, which cannot throw: prints an error, as Python does for errors in __del__. Does nothing if the
  // device is lost. The caller holds the GIL.
  void call_quietly(const char* method, pybind11::handle argument) const noexcept;

 private:
  const std::string name_;
  DriverErrors errors_;
  const pybind11::object object_;
  std::unique_ptr<NativeLauncher> launcher_;
};

// A native handle, which the driver returned as an integer.
inline void* as_pointer(const pybind11::object& number) {
  return reinterpret_cast<void*>(number.cast<uintptr_t>());
}

} // namespace backplane
