// What a planner can see of a call, as words to compare and to look plans up by.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/function_schema.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "plans/plan.h"

namespace backplane {

// Data pointers are told apart by their place within this many bytes: what the widest vector access of a kernel needs.
inline constexpr size_t kAlignmentClass = 16;

// What must be known of each argument, from the operator's schema and its declaration.
struct ArgumentFacts {
  bool written = false;
  bool passed_through = false; // numbers that only become kernel arguments: their type is in the signature, not their value
  bool is_generator = false;
  bool is_size = false; // integers are left open in dynamic-shape plans
};

// A class of calls, and which one of it.
struct Signature {
  c10::SmallVector<uint64_t, 32> words; // what plans are structured by: the class
  c10::SmallVector<int64_t, 48> sizes; // sizes, strides, distances between tensors in one storage, arguments of type SymInt
  uint64_t hash = 0; // of both

  bool operator==(const Signature& other) const {
    return hash == other.hash && words == other.words && sizes == other.sizes;
  }
};

uint64_t hash_of_class(const Signature& signature);

// Reads a call off its arguments: its signature, and the tensors and numbers that a replay needs. `call.device` is set
// already. Returns what makes the call impossible to sign, or nullptr.
const char* read_call(
    c10::ArrayRef<c10::IValue> arguments, const std::vector<ArgumentFacts>& facts, PlannedCall& call, Signature& signature);

// The value of a CPU tensor with no dimensions.
c10::Scalar cpu_value(const at::Tensor& tensor);

// Counts changes of settings that planners read; part of each signature.
uint64_t configuration_epoch();
void advance_configuration_epoch();

// A line for each argument.
std::string describe(c10::ArrayRef<c10::IValue> arguments, const std::vector<ArgumentFacts>& facts);

} // namespace backplane
