// A number whose value is not part of a plan (a passed-through number), as planners see it. They can pass it to
// launches.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "plans/plan.h"

namespace backplane {

struct PythonNumber {
  c10::Scalar value; // in this call
  const PlannedCall* call; // the call that it belongs to; compared only, never dereferenced
  uint32_t index; // into PlannedCall::numbers
  std::optional<at::Tensor> tensor; // the CPU tensor that it came in, if any
  NumberPart part = NumberPart::Whole; // the part to pass
  c10::ScalarType fits = c10::ScalarType::Undefined; // the dtype that must hold the value; Undefined: not checked
  std::optional<uint32_t> slot = std::nullopt; // in a trace: the tape slot of a number that is computed from sizes

  // Returns the value to pass. Throws if `fits` cannot hold the value.
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

// The first element of a list or tuple; a null object if the value is neither, or empty.
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
