// What an operator wants of its numbers, whatever they are in each call.
//
// A plan holds for any value of a number that is passed through, so what PyTorch checks of it is checked at each call: «lambd
// >= 0», «from <= to». A comparison with NaN does not hold, but for != and where it is said to be negated.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

namespace backplane {

// (argument, comparison, bound, condition): < <= > >= == !=, or one of them behind "not "; the bound is a number, another
// argument, or of the dtype of a tensor the greatest finite number, "finite(self)", or the lowest number, "lowest(self)", which
// is -inf for floating-point numbers; the condition is "" or an argument, perhaps behind "not ": a bool, or a list, which is true
// unless it is empty. Where it is not met the check is none.
using NumberCheck = std::tuple<std::string, std::string, std::variant<double, std::string>, std::string>;

class NumberChecks {
 public:
  NumberChecks() = default;
  // Throws ValueError where the schema has no such argument, or there is no such comparison.
  NumberChecks(const c10::FunctionSchema& schema, const std::vector<NumberCheck>& checks);

  // Of lists, each number is looked at; what is no number (None, complex) holds.
  bool hold(c10::ArrayRef<c10::IValue> arguments) const {
    return checks_.empty() || all_hold(arguments);
  }

 private:
  struct Bound { // an argument, or what its dtype says
    size_t argument;
    enum class Kind { Value, Finite, Lowest } kind;
  };
  struct Check {
    size_t argument;
    bool (*comparison)(double, double);
    bool expected; // false: negated
    std::variant<double, Bound> bound;
    std::optional<size_t> condition;
    bool condition_expected;
  };
  bool all_hold(c10::ArrayRef<c10::IValue> arguments) const;
  static std::optional<double> value_of(const Check& check, c10::ArrayRef<c10::IValue> arguments);
  static bool holds(const Check& check, const c10::IValue& value, c10::ArrayRef<c10::IValue> arguments);

  std::vector<Check> checks_;
};

} // namespace backplane
