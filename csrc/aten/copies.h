// Which way a copy goes. Asked of tensors by copy.cpp, and of traced ones by torch_backplane/planning/views.py.
#pragma once

namespace backplane {

// What there is to know of a copy. Each is asked only where the way depends on it: of symbols, an answer is a guard.
class CopyFacts {
 public:
  virtual ~CopyFacts() = default;
  // Both have the same dtype, sizes and strides, and are conjugated and negated lazily or not.
  virtual bool is_alike() const = 0;
  virtual bool shares_storage() const = 0;
  // Of such that do: whether the first elements are one.
  virtual bool starts_alike() const = 0;
  // The elements lie side by side, each once.
  virtual bool is_dense() const = 0;
};

enum class CopyWay {
  Nothing, // the elements are there already
  Bytes, // one run of them, by the device's own copy
  Elements // each from its place to its place: by a kernel, or by the CPU where there are none
};

CopyWay copy_way(const CopyFacts& facts);

} // namespace backplane
