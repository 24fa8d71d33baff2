// The object behind a device that a Python driver brought, and how the parts of the runtime that stand for it call it.
#pragma once

#include <c10/util/StringUtil.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <type_traits>

#include "devices/device.h"
#include "drivers/driver_errors.h"
#include "drivers/native_launcher.h"

namespace backplane {

// The GIL, for one call into a driver. Throws once Python has been finalized: nobody is left to be called.
class DriverCall {
 public:
  DriverCall();

 private:
  DeviceCall gil_;
};

// What the driver is doing, for messages; only put together where it is needed.
struct Doing {
  const char* what;
  size_t bytes = 0;
  const char* rest = "";

  std::string operator()() const {
    return bytes > 0 ? c10::str(what, bytes, rest) : what;
  }
};

// The calls run Python code, which may hand the GIL to another thread: no lock of ours is held around them.
class DriverObject {
 public:
  // `index`: the number that it will have; `name`: what the hardware calls itself. Asks the driver for its launcher.
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
  // Null: the driver's own launch() is called.
  const NativeLauncher* launcher() const noexcept {
    return launcher_.get();
  }
  // A method of the driver's, or another attribute. The caller has the GIL.
  auto attr(const char* name) const {
    return object_.attr(name);
  }

  // Calls the driver, with the GIL.
  template <typename Function>
  std::invoke_result_t<Function> ask(const Doing& doing, const Function& function) {
    errors_.check(); // before Python is asked for the GIL
    DriverCall call;
    return errors_.watch(doing, function);
  }
  template <typename Function>
  std::invoke_result_t<Function> ask(const char* doing, const Function& function) {
    return ask(Doing{doing}, function);
  }

  // For callers that are destructors, which cannot pass an error on: it is printed, as Python does with errors in
  // __del__. The driver of a lost device is left alone. The caller has the GIL.
  void call_quietly(const char* method, pybind11::handle argument) const noexcept;

 private:
  const std::string name_;
  DriverErrors errors_;
  const pybind11::object object_;
  std::unique_ptr<NativeLauncher> launcher_;
};

// What a driver means by an integer.
inline void* as_pointer(const pybind11::object& number) {
  return reinterpret_cast<void*>(number.cast<uintptr_t>());
}

} // namespace backplane
