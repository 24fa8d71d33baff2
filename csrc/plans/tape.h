// What a dynamic-shape plan computes of the sizes of a call: which conditions they meet, and numbers.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <vector>

namespace backplane {

// Integers of 64 bits. Division and remainder round as Python's do; comparisons and the like give 0 or 1. TrueDivide to
// FloatDivide give the bits of a double, and the last three take them. The tape holds only where what is required is so;
// only programs require anything but Guard.
enum class TapeOperation : uint8_t {
  Constant, Size, Guard, Add, Subtract, Multiply, FloorDivide, Remainder, Minimum, Maximum, Equal, NotEqual, Less, LessEqual,
  TrueDivide, ToFloat, FloatAdd, FloatSubtract, FloatMultiply, FloatDivide,
  RequireEqual, RequireNotEqual, RequireLess, RequireLessEqual,
};

// A tape in the form that runs: constants and sizes have slots of their own, what is known already is not computed, and
// what nobody wants neither.
class TapeProgram {
 public:
  using Slots = c10::SmallVector<int64_t, 64>;

  // Fills the slots. False where the tape does not hold, or a number is too large.
  bool run(c10::ArrayRef<int64_t> sizes, Slots& slots) const;

  size_t instructions() const {
    return code_.size();
  }

 private:
  friend class TapeCompiler;
  struct Instruction {
    TapeOperation operation;
    uint32_t a, b, to; // slots
  };
  size_t sizes_ = 0; // which the first slots hold
  std::vector<int64_t> constants_; // the next
  size_t slots_ = 0;
  std::vector<Instruction> code_;
};

// A tape as it is written: a short program without branches, in the order in which a planner computed
// (torch_backplane/planning/tracing.py). Where it looked at a number to decide what to do there is a guard, and the tape
// holds only for calls where the number is the same. What comes after a guard may rely on it.
class Tape {
 public:
  struct Instruction {
    TapeOperation operation;
    uint32_t a = 0; // slots; of Size, which word
    uint32_t b = 0;
    int64_t constant = 0; // of Constant, and of Guard: what the slot has to hold
  };

  // The slot of the result. Throws ValueError for slots that there are not.
  uint32_t append(Instruction instruction);

  size_t slots() const {
    return code_.size();
  }

  // The program that computes these slots, which become those of the program.
  TapeProgram compile(c10::ArrayRef<uint32_t*> wanted) const;

 private:
  std::vector<Instruction> code_;
};

// The operation of this name in Python's module of names, such as "add"; throws ValueError where there is none.
TapeOperation tape_operation(const std::string& name);

} // namespace backplane
