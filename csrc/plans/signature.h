// The part of a call that a planner can see, encoded as words: the key under which plans are stored.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "plans/plan.h"

namespace backplane {

// Signatures include addresses modulo this many bytes, the alignment that a kernel's widest vector access needs.
inline constexpr size_t kAlignmentClass = 16;

// Properties of an argument, from the operator's schema and its declaration.
struct ArgumentFacts {
  bool written = false;
  bool passed_through = false; // numbers only become kernel arguments: the signature has their type, not their value
  bool is_generator = false;
  bool is_size = false; // integers are sizes: symbolic in traces
};

// A class of calls (words), and a call of the class (sizes).
struct Signature {
  c10::SmallVector<uint64_t, 32> words; // everything else that a planner sees
  c10::SmallVector<int64_t, 48> sizes; // sizes, strides, distances of tensors in one storage, integers with is_size
  uint64_t hash = 0; // of words and sizes

  bool operator==(const Signature& other) const {
    return hash == other.hash && words == other.words && sizes == other.sizes;
  }
};

uint64_t hash_of_class(const Signature& signature);

// Computes the call's signature, and fills `call` with the tensors and numbers that a replay needs. `call.device` must
// be set, and `call.tf32` if it is a part of the signature. Returns nullptr, or why the call has no signature.
const char* read_call(
    c10::ArrayRef<c10::IValue> arguments,
    const std::vector<ArgumentFacts>& facts,
    PlannedCall& call,
    Signature& signature);

// What PyTorch lets CUDA compute in TF32: bit 0 for float32 products, bit 1 for convolutions. Reading it takes as long
// as the rest of a signature, so it is only a part of signatures of operators whose planners read it (PlannerScope).
uint64_t float32_in_tf32();
// Makes it a part of a signature that was computed without it.
void add_tf32(Signature& signature, uint64_t tf32);

// The value of a zero-dimensional CPU tensor.
c10::Scalar cpu_value(const at::Tensor& tensor);

// A counter of changes to settings that planners read. Part of each signature.
uint64_t configuration_epoch();
void advance_configuration_epoch();

// Describes each argument, one per line.
std::string describe(c10::ArrayRef<c10::IValue> arguments, const std::vector<ArgumentFacts>& facts);

} // namespace backplane
