// Conditions on an operator's number arguments, checked at every call.
//
// A plan is valid for any value of a passed-through number, so PyTorch's checks of these numbers run at each call, for
// example `lambd >= 0` or `from <= to`. Comparisons with NaN are false, except `!=`; a negated comparison is then true.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

namespace backplane {

// (argument, comparison, bound, condition)
//   comparison: < <= > >= == !=, optionally preceded by "not ".
//   bound: a number; the name of another argument; or, for the dtype of a tensor argument such as `self`,
//     "finite(self)" for its greatest finite value, or "lowest(self)" for its lowest value (-inf for floating-point
//     dtypes).
//   condition: "", or the name of a bool or list argument, optionally preceded by "not ". A list is true unless it is
//     empty. If the condition does not hold, the check is skipped.
using NumberCheck = std::tuple<std::string, std::string, std::variant<double, std::string>, std::string>;

class NumberChecks {
 public:
  NumberChecks() = default;
  // Throws ValueError for an argument that is not in the schema, or an unknown comparison.
  NumberChecks(const c10::FunctionSchema& schema, const std::vector<NumberCheck>& checks);

  // Whether all checks hold. Checks every element of a list. Values that are not real numbers (None, complex) pass.
  bool hold(c10::ArrayRef<c10::IValue> arguments) const {
    return checks_.empty() || all_hold(arguments);
  }

 private:
  struct Bound { // an argument's value, or a limit of its dtype
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
