// The choice of how to perform a copy within a device. Used by copy.cpp for tensors, and by
// torch_backplane/planning/views.py in traces.
#pragma once

namespace backplane {

// The facts that the choice depends on. Each is queried only if it matters, because in a trace every answer is a guard.
class CopyFacts {
 public:
  virtual ~CopyFacts() = default;
  // Both tensors have the same dtype, sizes, strides, and conjugate and negative bits.
  virtual bool is_alike() const = 0;
  virtual bool shares_storage() const = 0;
  // For tensors that share a storage: both have the same first element.
  virtual bool starts_alike() const = 0;
  // The elements are non-overlapping and dense.
  virtual bool is_dense() const = 0;
};

enum class CopyMethod {
  Nothing, // source and destination are the same elements
  Bytes, // one contiguous copy by the device
  Elements // element by element: by a kernel, or by the CPU on devices without kernels
};

CopyMethod copy_method(const CopyFacts& facts);

} // namespace backplane
