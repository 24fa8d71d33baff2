// What a planner in Python gives to a kernel, or to a function of a library: memory and numbers, in the order of its
// parameters.
#pragma once

#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "devices/compiled_kernel.h"
#include "plans/recorder.h"

namespace backplane {

class PythonArguments {
 public:
  // `kind` and `name` say of what, for messages. All memory must be on the device. Memory that is written, and shared
  // lazily, is another's afterwards.
  PythonArguments(
      const char* kind, const std::string& name, c10::DeviceIndex device, const std::vector<KernelParameter>& parameters,
      const pybind11::sequence& values);
  PythonArguments(const PythonArguments&) = delete; // arguments point to numbers
  PythonArguments& operator=(const PythonArguments&) = delete;

  c10::ArrayRef<KernelArgument> now() const {
    return arguments_;
  }
  // Of the recording that goes on in this thread, if there is one.
  std::vector<PlannedArgument> take_recorded() {
    return std::move(recorded_);
  }
  // Device memory that device_errors.h watches is among them.
  bool reports_errors() const {
    return reports_errors_;
  }

 private:
  c10::SmallVector<KernelArgument, 24> arguments_;
  c10::SmallVector<uint64_t, 24> numbers_;
  std::vector<PlannedArgument> recorded_;
  bool reports_errors_ = false;
};

} // namespace backplane
