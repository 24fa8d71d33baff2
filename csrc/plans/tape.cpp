#include "plans/tape.h"

#include <c10/util/Exception.h>
#include <c10/util/bit_cast.h>

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

namespace backplane {
namespace {

double as_double(int64_t bits) {
  return c10::bit_cast<double>(bits);
}

int64_t as_bits(double number) {
  return c10::bit_cast<int64_t>(number);
}

// Whether a double represents this and all smaller magnitudes exactly.
bool is_exact(int64_t number) {
  constexpr int64_t kLimit = int64_t{1} << 53;
  return number >= -kLimit && number <= kLimit;
}

// Returns false for a divisor of 0, and for the one quotient that overflows.
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

// Applies an operation to two numbers. Returns false if a requirement does not hold or the result cannot be
// represented.
inline bool apply(TapeOperation operation, int64_t a, int64_t b, int64_t& result) {
  using O = TapeOperation;
  int64_t other = 0;
  switch (operation) {
    case O::Constant:
    case O::Size:
    case O::Guard:
      return false; // not in programs
    case O::Add:
      if (__builtin_add_overflow(a, b, &result)) {
        return false;
      }
      break;
    case O::Subtract:
      if (__builtin_sub_overflow(a, b, &result)) {
        return false;
      }
      break;
    case O::Multiply:
      if (__builtin_mul_overflow(a, b, &result)) {
        return false;
      }
      break;
    case O::FloorDivide:
      if (!floor_divide(a, b, result, other)) {
        return false;
      }
      break;
    case O::Remainder:
      if (!floor_divide(a, b, other, result)) {
        return false;
      }
      break;
    case O::Minimum:
      result = std::min(a, b);
      break;
    case O::Maximum:
      result = std::max(a, b);
      break;
    case O::Equal:
      result = a == b;
      break;
    case O::NotEqual:
      result = a != b;
      break;
    case O::Less:
      result = a < b;
      break;
    case O::LessEqual:
      result = a <= b;
      break;
    case O::TrueDivide:
      if (b == 0 || !is_exact(a) || !is_exact(b)) { // for larger numbers, Python rounds only the quotient
        return false;
      }
      result = as_bits(static_cast<double>(a) / static_cast<double>(b));
      break;
    case O::ToFloat:
      result = as_bits(static_cast<double>(a));
      break;
    case O::FloatAdd:
      result = as_bits(as_double(a) + as_double(b));
      break;
    case O::FloatSubtract:
      result = as_bits(as_double(a) - as_double(b));
      break;
    case O::FloatMultiply:
      result = as_bits(as_double(a) * as_double(b));
      break;
    case O::FloatDivide:
      if (as_double(b) == 0) {
        return false;
      }
      result = as_bits(as_double(a) / as_double(b));
      break;
    case O::RequireEqual:
      return a == b;
    case O::RequireNotEqual:
      return a != b;
    case O::RequireLess:
      return a < b;
    case O::RequireLessEqual:
      return a <= b;
  }
  return true;
}

bool is_requirement(TapeOperation operation) {
  return operation >= TapeOperation::RequireEqual;
}

bool is_comparison(TapeOperation operation) {
  return operation >= TapeOperation::Equal && operation <= TapeOperation::LessEqual;
}

bool has_operands(TapeOperation operation) {
  return operation != TapeOperation::Constant && operation != TapeOperation::Size;
}

} // namespace

class TapeCompiler {
 public:
  explicit TapeCompiler(c10::ArrayRef<Tape::Instruction> tape) {
    for (const Tape::Instruction& one : tape) {
      values_.push_back(value_of(one));
    }
  }

  TapeProgram finish(c10::ArrayRef<uint32_t*> wanted) {
    // Mark, backwards, what the wanted slots and all requirements depend on.
    std::vector<bool> used(steps_.size());
    const auto use = [&](const Value& value) {
      if (value.kind == Value::Kind::Result) {
        used[value.number] = true;
      }
    };
    std::vector<Value> results;
    for (const uint32_t* slot : wanted) {
      results.push_back(now(values_[*slot]));
      use(results.back());
    }
    for (size_t i = steps_.size(); i-- > 0;) {
      const Step& one = steps_[i];
      if (is_requirement(one.operation) || used[i]) {
        use(one.a);
        use(one.b);
      }
    }
    // Slots: sizes first, then constants, then results.
    TapeProgram program;
    program.sizes_ = sizes_;
    const auto constant = [&](const Value& value) {
      if (value.kind == Value::Kind::Constant && constants_.emplace(value.number, constants_.size()).second) {
        program.constants_.push_back(value.number);
      }
    };
    std::for_each(results.begin(), results.end(), constant);
    for (size_t i = 0; i < steps_.size(); ++i) {
      if (is_requirement(steps_[i].operation) || used[i]) {
        constant(steps_[i].a);
        constant(steps_[i].b);
      }
    }
    uint32_t next = static_cast<uint32_t>(sizes_ + constants_.size());
    const uint32_t nowhere = next++; // the unused result of requirements
    std::vector<uint32_t> slots(steps_.size());
    const auto slot_of = [&](const Value& value) {
      switch (value.kind) {
        case Value::Kind::Size:
          return static_cast<uint32_t>(value.number);
        case Value::Kind::Constant:
          return static_cast<uint32_t>(sizes_ + constants_.at(value.number));
        case Value::Kind::Result:
          break;
      }
      return slots[value.number];
    };
    for (size_t i = 0; i < steps_.size(); ++i) {
      const Step& one = steps_[i];
      if (is_requirement(one.operation)) {
        program.code_.push_back({one.operation, slot_of(one.a), slot_of(one.b), nowhere});
      } else if (used[i]) {
        slots[i] = next++;
        program.code_.push_back({one.operation, slot_of(one.a), slot_of(one.b), slots[i]});
      }
    }
    program.slots_ = next;
    for (size_t i = 0; i < wanted.size(); ++i) {
      *wanted[i] = slot_of(results[i]);
    }
    return program;
  }

 private:
  // The content of a tape slot.
  struct Value {
    enum class Kind : uint8_t { Size, Constant, Result };
    Kind kind;
    int64_t number; // index of the size, the constant, or index of the step

    bool operator<(const Value& other) const {
      return std::tie(kind, number) < std::tie(other.kind, other.number);
    }
    bool operator==(const Value& other) const {
      return kind == other.kind && number == other.number;
    }
    bool is(int64_t constant) const {
      return kind == Kind::Constant && number == constant;
    }
  };
  struct Step {
    TapeOperation operation;
    Value a, b;

    bool operator<(const Step& other) const {
      return std::tie(operation, a, b) < std::tie(other.operation, other.a, other.b);
    }
  };
  using O = TapeOperation;

  static Value constant(int64_t number) {
    return {Value::Kind::Constant, number};
  }

  // The value, or the constant that the guards so far imply for it.
  Value now(const Value& value) const {
    const auto found = known_.find(value);
    return found == known_.end() ? value : constant(found->second);
  }

  Value value_of(const Tape::Instruction& one) {
    switch (one.operation) {
      case O::Constant:
        return constant(one.constant);
      case O::Size:
        sizes_ = std::max(sizes_, size_t{one.a} + 1);
        return now({Value::Kind::Size, one.a});
      case O::Guard:
        guard(values_[one.a], one.constant);
        return constant(one.constant);
      default:
        return now(computed({one.operation, now(values_[one.a]), now(values_[one.b])}));
    }
  }

  Value computed(const Step& step) {
    const auto& [operation, a, b] = step;
    if (int64_t result = 0; a.kind == Value::Kind::Constant && b.kind == Value::Kind::Constant &&
        apply(operation, a.number, b.number, result)) {
      return constant(result);
    }
    const bool adds = operation == O::Add || operation == O::Subtract;
    if ((adds && b.is(0)) || ((operation == O::Multiply || operation == O::FloorDivide) && b.is(1))) {
      return a;
    }
    if ((operation == O::Add && a.is(0)) || (operation == O::Multiply && a.is(1))) {
      return b;
    }
    if (a == b && is_comparison(operation)) {
      return constant(operation == O::Equal || operation == O::LessEqual);
    }
    return append(step);
  }

  // The value of the step. Identical steps are added once.
  Value append(const Step& step) {
    const auto [found, is_new] = seen_.emplace(step, steps_.size());
    if (is_new) {
      steps_.push_back(step);
    }
    return {Value::Kind::Result, static_cast<int64_t>(found->second)};
  }

  void guard(const Value& guarded, int64_t expected) {
    const Value value = now(guarded);
    if (value.is(expected)) {
      return;
    }
    known_[value] = expected;
    if (value.kind == Value::Kind::Result && is_comparison(steps_[value.number].operation)) {
      const Step made = steps_[value.number]; // a copy, because compare() appends to steps_
      if (expected == 0 || expected == 1) {
        compare(made.operation, now(made.a), now(made.b), expected == 1);
        return;
      }
    }
    append({O::RequireEqual, value, constant(expected)});
  }

  // Requires that the comparison is true (`so`) or false.
  void compare(TapeOperation operation, const Value& a, const Value& b, bool so) {
    if (operation == O::Less || operation == O::LessEqual) {
      const bool is_less = (operation == O::Less) == so;
      require(is_less ? O::RequireLess : O::RequireLessEqual, so ? a : b, so ? b : a);
      return;
    }
    const bool is_equal = (operation == O::Equal) == so;
    require(is_equal ? O::RequireEqual : O::RequireNotEqual, a, b);
    if (is_equal && a.kind != Value::Kind::Constant && b.kind == Value::Kind::Constant) {
      known_[a] = b.number;
    } else if (is_equal && a.kind == Value::Kind::Constant && b.kind != Value::Kind::Constant) {
      known_[b] = a.number;
    }
  }

  void require(TapeOperation operation, const Value& a, const Value& b) {
    int64_t nothing = 0;
    const bool is_known = a.kind == Value::Kind::Constant && b.kind == Value::Kind::Constant;
    if (!is_known || !apply(operation, a.number, b.number, nothing)) {
      append({operation, a, b});
    }
  }

  size_t sizes_ = 0;
  std::vector<Value> values_; // by tape slot
  std::vector<Step> steps_;
  std::map<Step, size_t> seen_;
  std::map<Value, int64_t> known_; // constants implied by guards
  std::map<int64_t, size_t> constants_;
};

bool TapeProgram::run(c10::ArrayRef<int64_t> sizes, Slots& slots) const {
  if (sizes.size() < sizes_) {
    return false;
  }
  slots.resize_for_overwrite(slots_);
  std::copy_n(sizes.begin(), sizes_, slots.begin());
  std::copy(constants_.begin(), constants_.end(), slots.begin() + sizes_);
  for (const Instruction& one : code_) {
    int64_t result = 0;
    if (!apply(one.operation, slots[one.a], slots[one.b], result)) {
      return false;
    }
    slots[one.to] = result;
  }
  return true;
}

uint32_t Tape::append(Instruction instruction) {
  TORCH_CHECK_VALUE(
      !has_operands(instruction.operation) || (instruction.a < code_.size() && instruction.b < code_.size()),
      "a tape of ", code_.size(), " instructions has no slots ", instruction.a, " and ", instruction.b);
  code_.push_back(instruction);
  return static_cast<uint32_t>(code_.size() - 1);
}

TapeProgram Tape::compile(c10::ArrayRef<uint32_t*> wanted) const {
  return TapeCompiler(code_).finish(wanted);
}

TapeOperation tape_operation(const std::string& name) {
  using O = TapeOperation;
  static const std::map<std::string, O> kNames = {
      {"constant", O::Constant},
      {"size", O::Size},
      {"guard", O::Guard},
      {"add", O::Add},
      {"sub", O::Subtract},
      {"mul", O::Multiply},
      {"floordiv", O::FloorDivide},
      {"mod", O::Remainder},
      {"min", O::Minimum},
      {"max", O::Maximum},
      {"eq", O::Equal},
      {"ne", O::NotEqual},
      {"lt", O::Less},
      {"le", O::LessEqual},
      {"truediv", O::TrueDivide},
      {"to_float", O::ToFloat},
      {"float_add", O::FloatAdd},
      {"float_sub", O::FloatSubtract},
      {"float_mul", O::FloatMultiply},
      {"float_truediv", O::FloatDivide},
  };
  const auto found = kNames.find(name);
  TORCH_CHECK_VALUE(found != kNames.end(), "unknown tape operation ", name);
  return found->second;
}

} // namespace backplane
