// The recorded commands of one planner call, in a form that replays without Python: allocations, commands, results.
//
// Steps that become commands (devices/command.h) contain no addresses. They refer to memory by its origin: an argument
// of the call, an allocation of the plan, or memory that the plan keeps. A plan is therefore valid for every call with
// the same signature (signature.h).
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "devices/command.h"
#include "devices/compiled_kernel.h"
#include "devices/queue_function.h"

namespace backplane {

struct Address {
  enum class Base : uint8_t { Argument, Allocation, Kept };
  Base base;
  uint32_t index;
  int64_t offset; // bytes from the first element of the argument or kept tensor, or from the start of the allocation

  bool operator==(const Address&) const = default;
};

// One argument of a launch: memory, a number that is fixed in the plan, or a number that each call supplies.
enum class NumberPart : uint8_t { Whole, Real, Imaginary }; // kernels take complex numbers in parts
struct PassedNumber {
  uint32_t index; // into PlannedCall::numbers
  c10::ScalarType dtype;
  NumberPart part = NumberPart::Whole;
  c10::ScalarType fits = c10::ScalarType::Undefined; // the dtype that must hold the value; Undefined: not checked

  bool operator==(const PassedNumber&) const = default;
};
struct Literal {
  uint64_t bits;
  uint32_t bytes;

  bool operator==(const Literal&) const = default;
};
using PlannedArgument = std::variant<Address, Literal, PassedNumber>;
using PlannedNumber = std::variant<Literal, PassedNumber>;

struct AllocateStep {
  uint32_t index;
  size_t bytes;

  bool operator==(const AllocateStep&) const = default;
};
struct FreeStep {
  uint32_t index;

  bool operator==(const FreeStep&) const = default;
};
struct LaunchStep {
  std::shared_ptr<const CompiledKernel> kernel;
  LaunchSpec spec;
  std::vector<PlannedArgument> arguments;
  bool reports_errors; // see device_errors.h

  bool operator==(const LaunchStep& other) const {
    return kernel == other.kernel && spec == other.spec && arguments == other.arguments;
  }
};
struct LibraryStep {
  std::shared_ptr<const QueueFunction> function;
  std::vector<PlannedArgument> arguments;
  bool reports_errors;

  bool operator==(const LibraryStep& other) const {
    return function->text() == other.function->text() && arguments == other.arguments;
  }
};
struct HostCallbackStep {
  std::shared_ptr<const HostFunction> function;
  std::vector<Address> memory;
  std::vector<PlannedNumber> numbers;

  bool operator==(const HostCallbackStep& other) const {
    return function->text() == other.function->text() && memory == other.memory && numbers == other.numbers;
  }
};
struct CopyStep { // within the device
  Address destination;
  Address source;
  size_t bytes;

  bool operator==(const CopyStep&) const = default;
};
struct CheckStep { // checks the range of a number that no command uses
  PassedNumber number;

  bool operator==(const CheckStep&) const = default;
};
struct WarnStep { // a warning that PyTorch issues at every call
  std::string text;

  bool operator==(const WarnStep&) const = default;
};
using Step =
    std::variant<AllocateStep, FreeStep, LaunchStep, LibraryStep, HostCallbackStep, CopyStep, CheckStep, WarnStep>;

// Takes `count` random numbers from the call's generator. Its seed and offset become the call's numbers `first_number`
// and `first_number + 1`.
struct RandomUse {
  uint64_t count;
  uint32_t first_number;

  bool operator==(const RandomUse&) const = default;
};

// A tensor that the call returns: an argument itself, a view of an argument's memory, or a tensor in an allocation.
struct ResultTensor {
  enum class Kind : uint8_t { Undefined, Argument, View, New };
  Kind kind = Kind::Undefined;
  int32_t index = 0; // of the argument or the allocation; -1: an empty storage
  c10::ScalarType dtype = c10::kFloat;
  c10::SmallVector<int64_t, 4> sizes;
  c10::SmallVector<int64_t, 4> strides;
  int64_t offset = 0; // elements, from the start of the storage (New) or the argument's first element (View)

  bool operator==(const ResultTensor&) const = default;
};
using Result = std::variant<ResultTensor, std::vector<ResultTensor>, c10::IValue>; // IValue: a number, not a tensor

// The inputs of one call that a plan depends on.
struct PlannedCall {
  c10::DeviceIndex device;
  c10::SmallVector<const at::Tensor*, 8> tensors; // bp tensors among the arguments, in order, lists flattened
  c10::SmallVector<bool, 8> written; // for each tensor
  c10::SmallVector<c10::Scalar, 4> numbers; // passed-through numbers, then (seed, offset) of each RandomUse
  const c10::IValue* generator = nullptr; // the Generator argument, if the operator has one
  const std::string* operator_name = nullptr; // for errors that are reported asynchronously
  std::optional<uint64_t> tf32; // float32_in_tf32() (signature.h), if planners of the operator have read it
};

struct Plan {
  std::vector<Step> steps;
  std::vector<RandomUse> random;
  std::vector<at::Tensor> kept; // memory that is neither an argument nor allocated
  std::vector<Result> results;
  uint32_t allocations = 0;
  uint32_t numbers = 0; // count of passed-through numbers

  // Why calls with this signature have no plan; empty if they have one.
  std::string unplannable;
  bool falls_back = false; // without a plan: such calls run the fallback instead of the planner
};

// Returns the given part of a number. The imaginary part of a real number is 0.
c10::Scalar part_of(const c10::Scalar& number, NumberPart part);

// Runs the plan and returns the operator's results, in schema order. Does not acquire the GIL unless the device does.
c10::SmallVector<c10::IValue, 2> replay(const Plan& plan, PlannedCall& call);

// Takes `count` numbers from the call's generator, or from the device's default generator, and appends seed and offset
// to the call's numbers.
void take_random_numbers(PlannedCall& call, uint64_t count);

// Throws the error that a replay would throw for a passed-through number that is out of range.
void check_numbers(const Plan& plan, const PlannedCall& call);

// Describes the first difference between two plans of one call; empty if there is none.
std::string difference(const Plan& one, const Plan& other);
// Describes each step and result, one per line.
std::string describe(const Plan& plan);

} // namespace backplane
