#include "plans/tape.h"

#include <c10/util/Exception.h>
#include <c10/util/bit_cast.h>

#include <algorithm>
#include <limits>
#include <map>

namespace backplane {
namespace {

double as_double(int64_t bits) {
  return c10::bit_cast<double>(bits);
}

int64_t as_bits(double number) {
  return c10::bit_cast<int64_t>(number);
}

// Whether a double holds it, and all that are smaller.
bool is_exact(int64_t number) {
  constexpr int64_t kLimit = int64_t{1} << 53;
  return number >= -kLimit && number <= kLimit;
}

// Of numbers that fit: false for a divisor of 0, and for the one quotient that is too large.
bool floor_divide(int64_t a, int64_t b, int64_t& quotient, int64_t& remainder) {
  if (b == 0 || (b == -1 && a == std::numeric_limits<int64_t>::min())) {
    return false;
  }
  quotient = a / b;
  remainder = a % b;
  if (remainder != 0 && (remainder < 0) != (b < 0)) {
    --quotient;
    remainder += b;
  }
  return true;
}

} // namespace

uint32_t Tape::append(Instruction instruction) {
  const bool has_operands = instruction.operation != Operation::Constant && instruction.operation != Operation::Size;
  TORCH_CHECK_VALUE(
      !has_operands || (instruction.a < code_.size() && instruction.b < code_.size()), "a tape of ", code_.size(),
      " instructions has no slots ", instruction.a, " and ", instruction.b);
  code_.push_back(instruction);
  return static_cast<uint32_t>(code_.size() - 1);
}

bool Tape::run(c10::ArrayRef<int64_t> sizes, Slots& slots) const {
  slots.resize(code_.size());
  for (size_t i = 0; i < code_.size(); ++i) {
    const Instruction& one = code_[i];
    const bool has_operands = one.operation != Operation::Constant && one.operation != Operation::Size;
    const int64_t a = has_operands ? slots[one.a] : 0;
    const int64_t b = has_operands ? slots[one.b] : 0;
    int64_t other = 0;
    int64_t& result = slots[i];
    switch (one.operation) {
      case Operation::Constant:
        result = one.constant;
        break;
      case Operation::Size:
        result = sizes[one.a];
        break;
      case Operation::Guard:
        if (a != one.constant) {
          return false;
        }
        result = a;
        break;
      case Operation::Add:
        if (__builtin_add_overflow(a, b, &result)) {
          return false;
        }
        break;
      case Operation::Subtract:
        if (__builtin_sub_overflow(a, b, &result)) {
          return false;
        }
        break;
      case Operation::Multiply:
        if (__builtin_mul_overflow(a, b, &result)) {
          return false;
        }
        break;
      case Operation::FloorDivide:
        if (!floor_divide(a, b, result, other)) {
          return false;
        }
        break;
      case Operation::Remainder:
        if (!floor_divide(a, b, other, result)) {
          return false;
        }
        break;
      case Operation::Minimum:
        result = std::min(a, b);
        break;
      case Operation::Maximum:
        result = std::max(a, b);
        break;
      case Operation::Equal:
        result = a == b;
        break;
      case Operation::NotEqual:
        result = a != b;
        break;
      case Operation::Less:
        result = a < b;
        break;
      case Operation::LessEqual:
        result = a <= b;
        break;
      case Operation::TrueDivide:
        if (b == 0 || !is_exact(a) || !is_exact(b)) { // Python rounds quotients of larger numbers once
          return false;
        }
        result = as_bits(static_cast<double>(a) / static_cast<double>(b));
        break;
      case Operation::ToFloat:
        result = as_bits(static_cast<double>(a));
        break;
      case Operation::FloatAdd:
        result = as_bits(as_double(a) + as_double(b));
        break;
      case Operation::FloatSubtract:
        result = as_bits(as_double(a) - as_double(b));
        break;
      case Operation::FloatMultiply:
        result = as_bits(as_double(a) * as_double(b));
        break;
      case Operation::FloatDivide:
        if (as_double(b) == 0) {
          return false;
        }
        result = as_bits(as_double(a) / as_double(b));
        break;
    }
  }
  return true;
}

Tape::Operation tape_operation(const std::string& name) {
  using O = Tape::Operation;
  static const std::map<std::string, O> kNames = {
      {"constant", O::Constant}, {"size", O::Size}, {"guard", O::Guard}, {"add", O::Add}, {"sub", O::Subtract},
      {"mul", O::Multiply}, {"floordiv", O::FloorDivide}, {"mod", O::Remainder}, {"min", O::Minimum}, {"max", O::Maximum},
      {"eq", O::Equal}, {"ne", O::NotEqual}, {"lt", O::Less}, {"le", O::LessEqual}, 
      {"truediv", O::TrueDivide}, {"to_float", O::ToFloat}, {"float_add", O::FloatAdd},
      {"float_sub", O::FloatSubtract}, {"float_mul", O::FloatMultiply}, {"float_truediv", O::FloatDivide},
  };
  const auto found = kNames.find(name);
  TORCH_CHECK_VALUE(found != kNames.end(), "a tape has no operation ", name);
  return found->second;
}

} // namespace backplane
