// A compiled kernel of one device, with its parameters.
#pragma once

#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "devices/device.h"

namespace backplane {

struct KernelParameter {
  std::optional<c10::ScalarType> number; // the dtype of a number; nullopt: memory
  bool written = false; // memory that the kernel writes to
};

class CompiledKernel : public std::enable_shared_from_this<CompiledKernel> {
 public:
  CompiledKernel(c10::DeviceIndex device, KernelSource source, std::vector<KernelParameter> parameters);
  ~CompiledKernel();
  CompiledKernel(const CompiledKernel&) = delete;
  CompiledKernel& operator=(const CompiledKernel&) = delete;

  c10::DeviceIndex device_index() const {
    return device_;
  }
  const std::string& entry() const {
    return entry_;
  }
  const std::vector<KernelParameter>& parameters() const {
    return parameters_;
  }
  KernelHandle handle() const {
    return handle_;
  }

 private:
  const c10::DeviceIndex device_;
  const std::string entry_;
  const std::vector<KernelParameter> parameters_;
  KernelHandle handle_;
};

// Writes a number in the representation of kernel arguments (float16 and bfloat16 as their bits, bool as a byte).
// Returns its size in bytes, at most 8. Throws TypeError for a dtype that kernel parameters do not support.
uint32_t store_number(const c10::Scalar& number, c10::ScalarType dtype, void* bytes);

// Throws PyTorch's overflow error if the number does not fit into the dtype. Every number fits into Undefined.
void check_fits(const c10::Scalar& number, c10::ScalarType dtype);

} // namespace backplane
