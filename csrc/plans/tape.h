// The computation of a dynamic-shape plan on a call's sizes: guards to check and numbers to fill in.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <vector>

namespace backplane {

// Operations on 64-bit integers. FloorDivide and Remainder round like Python's. Comparisons give 0 or 1. TrueDivide to
// FloatDivide return the bits of a double; FloatAdd to FloatDivide also take them. A tape is valid only if its guards
// and requirements hold. A Tape has only Guard; the compiler turns it into the Require operations of a TapeProgram.
enum class TapeOperation : uint8_t {
  Constant,
  Size,
  Guard,
  Add,
  Subtract,
  Multiply,
  FloorDivide,
  Remainder,
  Minimum,
  Maximum,
  Equal,
  NotEqual,
  Less,
  LessEqual,
  TrueDivide,
  ToFloat,
  FloatAdd,
  FloatSubtract,
  FloatMultiply,
  FloatDivide,
  RequireEqual,
  RequireNotEqual,
  RequireLess,
  RequireLessEqual,
};

// A compiled tape. Sizes and constants have their own slots; constants are folded, and unused results are not computed.
class TapeProgram {
 public:
  using Slots = c10::SmallVector<int64_t, 64>;

  // Fills the slots. Returns false if a requirement does not hold or a result cannot be represented.
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
  size_t sizes_ = 0; // in the first slots
  std::vector<int64_t> constants_; // in the next slots
  size_t slots_ = 0;
  std::vector<Instruction> code_;
};

// A tape as a trace writes it (torch_backplane/planning/tracing.py): a straight-line program of the planner's
// computations, in order. Where the planner branches on a number, the tape has a guard: it is valid only for calls in
// which the number is the same. Instructions after a guard may rely on it.
class Tape {
 public:
  struct Instruction {
    TapeOperation operation;
    uint32_t a = 0; // a slot; for Size, an index into Signature::sizes
    uint32_t b = 0; // a slot
    int64_t constant = 0; // the value of Constant, and the value that Guard requires of slot `a`
  };

  // Appends an instruction and returns the slot of its result. Throws ValueError if an operand's slot does not exist.
  uint32_t append(Instruction instruction);

  size_t slots() const {
    return code_.size();
  }

  // Returns a program that computes the wanted slots. Replaces each by its slot in the program.
  TapeProgram compile(c10::ArrayRef<uint32_t*> wanted) const;

 private:
  std::vector<Instruction> code_;
};

// The operation with this name in torch_backplane.planning.symbols, such as "add". Throws ValueError for an unknown
// name.
TapeOperation tape_operation(const std::string& name);

} // namespace backplane
