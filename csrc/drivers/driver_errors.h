// Errors of a Python driver's device. Converts DeviceError (torch_backplane.drivers.base) to c10::AcceleratorError
// (torch.AcceleratorError), with the device and the operation in the message, and remembers the loss of the device.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <string>
#include <type_traits>

#include "devices/driver_call.h"
#include "drivers/native_launcher.h"

namespace backplane {

class DriverErrors {
 public:
  // `name`: the device in messages, "bp:0 (name of the hardware)".
  explicit DriverErrors(std::string name) : name_(std::move(name)) {}
  ~DriverErrors() {
    delete lost_.load();
  }
  DriverErrors(const DriverErrors&) = delete;
  DriverErrors& operator=(const DriverErrors&) = delete;

  bool is_lost() const noexcept {
    return lost_.load(std::memory_order_acquire) != nullptr;
  }
  // Throws the error of the loss if the device is lost.
  void check() const {
    if (C10_UNLIKELY(is_lost())) {
      throw_lost();
    }
  }
  // Throws the AcceleratorError for a DeviceError; returns for other errors. The caller holds the GIL.
  void convert(const pybind11::error_already_set& error, const std::string& doing);
  // Throws the error that the driver's native_error() returns for an error of the native launcher. Takes the GIL.
  [[noreturn]] void convert(const NativeError& error, pybind11::handle device, const std::string& doing);

  // Throws for a failed library function, which the driver does not know. `why` explains the status; can be empty.
  [[noreturn]] void fail(
      const std::string& doing, const std::string& function, int status, const std::string& why) const;

  // Calls the driver and converts its errors. `doing()` describes the operation, for messages.
  template <typename Doing, typename Function>
  std::invoke_result_t<Function> watch(const Doing& doing, const Function& function) {
    check();
    const InsideDriverCall inside;
    try {
      return function();
    } catch (const pybind11::error_already_set& error) {
      convert(error, doing());
      throw;
    }
  }

 private:
  struct Loss {
    std::string text;
    int code;
  };

  [[noreturn]] void throw_lost() const;

  const std::string name_;
  std::atomic<const Loss*> lost_{nullptr}; // set once
};

} // namespace backplane
