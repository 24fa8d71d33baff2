#include "plans/number_checks.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>

#include "plans/signature.h"

namespace backplane {
namespace {

template <typename Comparison>
bool compare(double one, double other) {
  return Comparison()(one, other);
}

const std::map<std::string, bool (*)(double, double)> kComparisons = {
    {"<", &compare<std::less<>>},           {"<=", &compare<std::less_equal<>>}, {">", &compare<std::greater<>>},
    {">=", &compare<std::greater_equal<>>}, {"==", &compare<std::equal_to<>>},   {"!=", &compare<std::not_equal_to<>>},
};

size_t position(const c10::FunctionSchema& schema, const std::string& name) {
  const auto& arguments = schema.arguments();
  const auto found =
      std::find_if(arguments.begin(), arguments.end(), [&](const auto& one) { return one.name() == name; });
  TORCH_CHECK_VALUE(found != arguments.end(), schema.operator_name(), " has no argument ", name);
  return found - arguments.begin();
}

std::optional<double> real(const c10::Scalar& number) {
  return number.isComplex() ? std::nullopt : std::optional(number.toDouble());
}

std::optional<double> number(const c10::IValue& value) {
  if (value.isScalar()) {
    return real(value.toScalar());
  }
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.device().is_cpu() && tensor.dim() == 0) {
      return real(cpu_value(tensor));
    }
  }
  return std::nullopt;
}

std::optional<double> greatest_finite(c10::ScalarType dtype) {
  switch (dtype) {
#define BACKPLANE_GREATEST(type, name) \
  case c10::ScalarType::name:          \
    return static_cast<double>(std::numeric_limits<type>::max());
    AT_FORALL_SCALAR_TYPES_AND3(Bool, Half, BFloat16, BACKPLANE_GREATEST)
#undef BACKPLANE_GREATEST
    default:
      return std::nullopt;
  }
}

std::optional<double> lowest(c10::ScalarType dtype) {
  if (c10::isFloatingType(dtype)) {
    return -std::numeric_limits<double>::infinity();
  }
  switch (dtype) {
#define BACKPLANE_LOWEST(type, name) \
  case c10::ScalarType::name:        \
    return static_cast<double>(std::numeric_limits<type>::lowest());
    AT_FORALL_INT_TYPES(BACKPLANE_LOWEST)
#undef BACKPLANE_LOWEST
    default:
      return c10::isIntegralType(dtype, /*includeBool=*/true) ? std::optional(0.0) : std::nullopt; // unsigned and bool
  }
}

bool is_true(const c10::IValue& value) {
  return value.isList() ? !value.toListRef().empty() : value.toBool();
}

} // namespace

NumberChecks::NumberChecks(const c10::FunctionSchema& schema, const std::vector<NumberCheck>& checks) {
  static const std::string kNot = "not ";
  for (const auto& [argument, text, bound, condition] : checks) {
    const bool negated = text.rfind(kNot, 0) == 0;
    const auto comparison = kComparisons.find(negated ? text.substr(kNot.size()) : text);
    TORCH_CHECK_VALUE(
        comparison != kComparisons.end(),
        "a comparison must be <, <=, >, >=, == or !=, optionally preceded by \"not \", but got ", text);
    Check check{position(schema, argument), comparison->second, !negated, 0.0, std::nullopt, true};
    if (const auto* name = std::get_if<std::string>(&bound)) {
      const auto open = name->find('(');
      const bool of_dtype = open != std::string::npos;
      check.bound = Bound{
          position(schema, of_dtype ? name->substr(open + 1, name->size() - open - 2) : *name),
          !of_dtype                           ? Bound::Kind::Value
              : name->rfind("finite", 0) == 0 ? Bound::Kind::Finite
                                              : Bound::Kind::Lowest};
    } else {
      check.bound = std::get<double>(bound);
    }
    if (!condition.empty()) {
      check.condition_expected = condition.rfind(kNot, 0) != 0;
      check.condition = position(schema, check.condition_expected ? condition : condition.substr(kNot.size()));
    }
    checks_.push_back(check);
  }
}

bool NumberChecks::all_hold(c10::ArrayRef<c10::IValue> arguments) const {
  return std::all_of(checks_.begin(), checks_.end(), [&](const Check& check) {
    return (check.condition.has_value() && is_true(arguments[*check.condition]) != check.condition_expected) ||
        holds(check, arguments[check.argument], arguments);
  });
}

std::optional<double> NumberChecks::value_of(const Check& check, c10::ArrayRef<c10::IValue> arguments) {
  const auto* bound = std::get_if<Bound>(&check.bound);
  if (bound == nullptr) {
    return std::get<double>(check.bound);
  }
  const c10::IValue& value = arguments[bound->argument];
  if (bound->kind == Bound::Kind::Value) {
    return number(value);
  }
  const auto dtype = value.toTensor().scalar_type();
  return bound->kind == Bound::Kind::Finite ? greatest_finite(dtype) : lowest(dtype);
}

bool NumberChecks::holds(const Check& check, const c10::IValue& value, c10::ArrayRef<c10::IValue> arguments) {
  if (value.isList()) {
    const auto elements = value.toListRef();
    return std::all_of(
        elements.begin(), elements.end(), [&](const c10::IValue& one) { return holds(check, one, arguments); });
  }
  const auto one = number(value);
  const auto bound = value_of(check, arguments);
  return !one.has_value() || !bound.has_value() || check.comparison(*one, *bound) == check.expected;
}

} // namespace backplane
