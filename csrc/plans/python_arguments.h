// Converts the arguments that a planner in Python passes to a kernel or library function: memory and numbers, in
// parameter order.
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
  // `kind` and `name` identify the callee in error messages. All memory must be on the device. Materializes written
  // copy-on-write memory.
  PythonArguments(
      const char* kind,
      const std::string& name,
      c10::DeviceIndex device,
      const std::vector<KernelParameter>& parameters,
      const pybind11::sequence& values);
  PythonArguments(const PythonArguments&) = delete; // arguments point to numbers
  PythonArguments& operator=(const PythonArguments&) = delete;

  // The arguments of this call.
  c10::ArrayRef<KernelArgument> now() const {
    return arguments_;
  }
  // The same arguments for a plan; empty unless a recorder is active in this thread.
  std::vector<PlannedArgument> take_recorded() {
    return std::move(recorded_);
  }
  // Whether the device's error words (streams/device_errors.h) are among the arguments.
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
