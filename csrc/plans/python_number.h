// A number whose value is not part of a plan, as planners see it: they pass it on to launches.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "plans/plan.h"

namespace backplane {

struct PythonNumber {
  c10::Scalar value; // of this call
  const PlannedCall* call; // whose number it is; only to be compared
  uint32_t index;
  std::optional<at::Tensor> tensor; // the CPU tensor that it came in
  NumberPart part = NumberPart::Whole; // what of it is passed on
  c10::ScalarType fits = c10::ScalarType::Undefined; // the dtype that it must be a value of, if that is to be checked
  std::optional<uint32_t> slot = std::nullopt; // of a number within a trace: where the tape has it

  // Throws where it does not fit.
  c10::Scalar passed_value() const {
    check_fits(value, fits);
    return part_of(value, part);
  }
  PythonNumber of_part(NumberPart wanted) const {
    PythonNumber copy = *this;
    copy.part = wanted;
    return copy;
  }
  PassedNumber passed(c10::ScalarType dtype) const {
    return {index, dtype, part, fits};
  }
};

// The first element of a list or tuple; nothing where it is none, or empty.
inline pybind11::object first_element(const pybind11::handle& value) {
  if (!pybind11::isinstance<pybind11::list>(value) && !pybind11::isinstance<pybind11::tuple>(value)) {
    return {};
  }
  const auto sequence = pybind11::reinterpret_borrow<pybind11::sequence>(value);
  return sequence.size() > 0 ? pybind11::object(sequence[0]) : pybind11::object();
}

inline bool is_number_list(const pybind11::handle& value) {
  const pybind11::object first = first_element(value);
  return first && pybind11::isinstance<PythonNumber>(first);
}

} // namespace backplane
