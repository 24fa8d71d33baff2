// What the emulated graph API of cuDNN is made of: descriptors with attributes, and tensors.

#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "library_handle.h"

enum Status : int {
  kSuccess = 0,
  kNotInitialized = 1001,
  kBadParam = 2000,
  kNullPointer = 2002,
  kMisalignedPointer = 2003,
  kNotFinalized = 2004,
  kOutOfBound = 2005,
  kSizeInsufficient = 2006,
  kShapeMismatch = 2008,
  kDuplicatedEntries = 2009,
  kAttributeType = 2010,
  kNotSupported = 3000,
  kNotSupportedLayout = 3004,
  kInternalError = 4000,
  kExecutionFailed = 5000,
};

// cudnnBackendDescriptorType_t
enum Kind : int {
  kPointwise = 0,
  kConvolution = 1,
  kEngine = 2,
  kEngineConfig = 3,
  kHeuristics = 4,
  kPlan = 5,
  kForward = 10,
  kOfWeight = 11,
  kOfImage = 12,
  kPointwiseOperation = 13,
  kGraph = 15,
  kVariantPack = 16,
  kTensor = 17,
  kProduct = 18,
  kProductOperation = 19,
  kReduction = 21,
  kReductionOperation = 22,
  kReshapeOperation = 31,
};

// cudnnBackendAttributeType_t
enum Type : int {
  kHandleType = 0,
  kDataType = 1,
  kBoolean = 2,
  kInt64 = 3,
  kFloat = 4,
  kDouble = 5,
  kPointer = 6,
  kConvolutionMode = 7,
  kHeuristicsMode = 8,
  kNumericalNote = 11,
  kPointwiseMode = 14,
  kDescriptor = 15,
  kReductionOperator = 18,
};

// cudnnDataType_t
enum Number : int { kFloats = 0, kDoubles = 1, kHalves = 2, kInt32s = 4, kBfloat16s = 9, kBooleans = 11 };

inline int bytes_of(int type) {
  return type == kBoolean ? 1
      : type == kDataType || type == kFloat || type == kConvolutionMode || type == kHeuristicsMode ||
          type == kPointwiseMode || type == kReductionOperator
      ? 4
      : 8;
}

struct Attribute {
  int type;
  int64_t count;
  std::vector<char> bytes;
};

struct Descriptor {
  Kind kind = kTensor;
  bool is_final = false;
  std::map<int, Attribute> attributes;
  std::vector<std::shared_ptr<Descriptor>> used;
  int engine = 0; // of engines and their configurations: which of the three
  int64_t workspace = 0; // bytes, of plans

  bool has(int name) const {
    return attributes.count(name) != 0;
  }
  template <class T>
  std::vector<T> all(int name) const {
    const Attribute& found = attributes.at(name);
    std::vector<T> values(found.count);
    memcpy(values.data(), found.bytes.data(), found.bytes.size());
    return values;
  }
  template <class T>
  T one(int name) const {
    T value;
    memcpy(&value, attributes.at(name).bytes.data(), sizeof value);
    return value;
  }
  // A descriptor that is an attribute. Null if it is destroyed.
  std::shared_ptr<Descriptor> link(int name) const {
    return find(one<Descriptor*>(name));
  }
};

inline int number_bytes(int type) { // of a cudnnDataType_t; 0 if it is not supported
  switch (type) {
    case kFloats:
    case kInt32s:
      return 4;
    case kDoubles:
      return 8;
    case kHalves:
    case kBfloat16s:
      return 2;
    case kBooleans:
      return 1;
    default:
      return 0;
  }
}

struct Tensor {
  std::vector<int64_t> sizes, strides;
  int type;
  int64_t id, alignment;
  bool is_virtual, is_by_value;

  explicit Tensor(const Descriptor& of)
      : sizes(of.all<int64_t>(902)),
        strides(of.all<int64_t>(903)),
        type(of.one<int>(901)),
        id(of.one<int64_t>(906)),
        alignment(of.one<int64_t>(900)),
        is_virtual(of.has(907) && of.one<bool>(907)),
        is_by_value(of.has(908) && of.one<bool>(908)) {}
  int64_t elements() const {
    int64_t count = 1;
    for (const int64_t size : sizes) {
      count *= size;
    }
    return count;
  }
  int64_t bytes() const {
    return elements() * number_bytes(type);
  }
  // The bytes from the first element to the last one.
  int64_t reach() const {
    int64_t last = 0;
    for (size_t d = 0; d < sizes.size(); ++d) {
      last += (sizes[d] - 1) * strides[d];
    }
    return (last + 1) * number_bytes(type);
  }
  // The dimensions of more than one element, from the innermost one on.
  std::vector<size_t> order() const {
    std::vector<size_t> found;
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (sizes[d] != 1) {
        found.push_back(d);
      }
    }
    std::sort(found.begin(), found.end(), [this](size_t a, size_t b) { return strides[a] < strides[b]; });
    return found;
  }
  bool is_dense() const { // of any order
    int64_t step = 1;
    for (const size_t d : order()) {
      if (strides[d] != step) {
        return false;
      }
      step *= sizes[d];
    }
    return true;
  }
  bool overlaps() const {
    int64_t reach = 0;
    for (const size_t d : order()) {
      if (strides[d] <= reach) {
        return true;
      }
      reach += (sizes[d] - 1) * strides[d];
    }
    return false;
  }
  bool has_channels_last() const {
    return sizes[1] > 1 && strides[1] == 1 && elements() != sizes[0] * sizes[1];
  }
};

// Calls a function with the index of each element.
template <class Function>
void for_each(const std::vector<int64_t>& sizes, Function function) {
  std::vector<int64_t> at(sizes.size());
  for (size_t d = sizes.size(); d != size_t(-1);) {
    function(at);
    for (d = sizes.size() - 1; d != size_t(-1) && ++at[d] == sizes[d]; --d) {
      at[d] = 0;
    }
  }
}

inline int64_t offset(const Tensor& tensor, const std::vector<int64_t>& at) {
  int64_t found = 0;
  for (size_t d = 0; d < at.size(); ++d) {
    found += at[d] * tensor.strides[d];
  }
  return found;
}
