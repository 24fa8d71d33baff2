// A compiled kernel of one device, and what each of its parameters is.
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
  std::optional<c10::ScalarType> number; // its dtype; nullopt: memory
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

// Writes a number as a kernel takes it (float16 and bfloat16 as their bits, bool as a byte) and returns its size in bytes,
// at most 8. Throws TypeError for a dtype that no kernel parameter has.
uint32_t store_number(const c10::Scalar& number, c10::ScalarType dtype, void* bytes);

// Throws PyTorch's error where the number is beyond the dtype. Undefined holds all.
void check_fits(const c10::Scalar& number, c10::ScalarType dtype);

} // namespace backplane
