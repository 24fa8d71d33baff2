// What a plan for any shape computes of the sizes of a call: which conditions they meet, and numbers.
//
// A tape is a short program without branches, in the order in which a planner computed (torch_backplane/planning/tracing.py):
// where it looked at a number to decide what to do there is a guard, and the tape holds only for calls where the number is the
// same. What comes after a guard may rely on it.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <vector>

namespace backplane {

class Tape {
 public:
  // Integers of 64 bits. Division and remainder round as Python's do; comparisons and the like give 0 or 1. TrueDivide to
  // FloatDivide give the bits of a double, and the last three take them.
  enum class Operation : uint8_t {
    Constant, Size, Guard, Add, Subtract, Multiply, FloorDivide, Remainder, Minimum, Maximum, Equal, NotEqual, Less, LessEqual,
    TrueDivide, ToFloat, FloatAdd, FloatSubtract, FloatMultiply, FloatDivide,
  };
  struct Instruction {
    Operation operation;
    uint32_t a = 0; // slots; of Size, which word
    uint32_t b = 0;
    int64_t constant = 0; // of Constant, and of Guard: what the slot has to hold
  };
  using Slots = c10::SmallVector<int64_t, 64>;

  // The slot of the result. Throws ValueError for slots that there are not.
  uint32_t append(Instruction instruction);

  // Fills the slots, one for each instruction. False where a guard does not hold, or a number is too large.
  bool run(c10::ArrayRef<int64_t> sizes, Slots& slots) const;

 private:
  std::vector<Instruction> code_;
};

// The operation of this name in Python's module of names, such as "add"; throws ValueError where there is none.
Tape::Operation tape_operation(const std::string& name);

} // namespace backplane
