// Errors of one device that a Python driver brought: DeviceErrors of torch_backplane.drivers.base become
// c10::AcceleratorErrors (torch.AcceleratorError) that name the device and what it was doing, and a device that its driver
// has lost stays lost.
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
  // `name` is how messages call the device: «bp:0 (what the hardware calls itself)».
  explicit DriverErrors(std::string name) : name_(std::move(name)) {}
  ~DriverErrors() {
    delete lost_.load();
  }
  DriverErrors(const DriverErrors&) = delete;
  DriverErrors& operator=(const DriverErrors&) = delete;

  bool is_lost() const noexcept {
    return lost_.load(std::memory_order_acquire) != nullptr;
  }
  // Throws what ended the device, if it is lost.
  void check() const {
    if (C10_UNLIKELY(is_lost())) {
      throw_lost();
    }
  }
  // Throws what a driver's error means to the user; returns if it is not a DeviceError. The caller has the GIL.
  void convert(const pybind11::error_already_set& error, const std::string& doing);
  // Throws what the driver says of an error of the native launcher. Takes the GIL.
  [[noreturn]] void convert(const NativeError& error, pybind11::handle device, const std::string& doing);

  // Throws for a function of a library, which is none of the driver's. `why` is empty where nobody knows.
  [[noreturn]] void fail(const std::string& doing, const std::string& function, int status, const std::string& why) const;

  // Calls the driver, which has `doing()` to do.
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
