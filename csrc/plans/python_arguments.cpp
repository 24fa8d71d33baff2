#include "plans/python_arguments.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "plans/python_number.h"
#include "streams/device_errors.h"

namespace py = pybind11;

namespace backplane {
namespace {

uint64_t bits_of(const c10::Scalar& number, c10::ScalarType dtype, uint32_t& bytes) {
  uint64_t bits = 0;
  bytes = store_number(number, dtype, &bits);
  return bits;
}

} // namespace

PythonArguments::PythonArguments(
    const char* kind,
    const std::string& name,
    c10::DeviceIndex device,
    const std::vector<KernelParameter>& parameters,
    const py::sequence& values)
    : arguments_(values.size()), numbers_(values.size()) {
  Recorder* recorder = Recorder::active();
  // Materialize copy-on-write memory first: this changes the addresses of all arguments in the same storage.
  for (size_t i = 0; i < values.size(); ++i) {
    const py::object given = values[i];
    if (parameters[i].number.has_value()) {
      continue;
    }
    TORCH_CHECK_TYPE(
        THPVariable_Check(given.ptr()), "argument ", i, " of ", kind, " ", name, " must be a tensor, but got ",
        py::str(py::type::of(given)).cast<std::string>());
    if (parameters[i].written) {
      const at::Tensor& tensor = THPVariable_Unpack(given.ptr());
      WriteWatch::wrote(tensor.storage());
      tensor.mutable_data_ptr();
    }
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const py::object given = values[i];
    if (!parameters[i].number.has_value()) {
      const at::Tensor& tensor = THPVariable_Unpack(given.ptr());
      TORCH_CHECK_VALUE(
          tensor.device() == c10::Device(c10::kPrivateUse1, device), "argument ", i, " of ", kind, " ", name, " is on ",
          tensor.device(), ", but the ", kind, " is on ", c10::Device(c10::kPrivateUse1, device));
      TORCH_CHECK_VALUE(
          !tensor.is_conj() && !tensor.is_neg(), "argument ", i, " of ", kind, " ", name,
          " is lazily conjugated or negated; call resolve_conj() and resolve_neg() first");
      arguments_[i] = {tensor.const_data_ptr(), 0};
      reports_errors_ |= are_error_words(tensor);
      if (recorder != nullptr) {
        recorded_.emplace_back(recorder->locate(tensor));
      }
      continue;
    }
    uint32_t bytes = 0;
    if (py::isinstance<PythonNumber>(given)) {
      const auto& number = given.cast<const PythonNumber&>();
      numbers_[i] = bits_of(number.passed_value(), *parameters[i].number, bytes);
      // A number of a nested call is constant in the recorded plan.
      if (recorder != nullptr && number.call == &recorder->call()) {
        recorded_.emplace_back(number.passed(*parameters[i].number));
      } else if (recorder != nullptr) {
        recorded_.emplace_back(Literal{numbers_[i], bytes});
      }
    } else {
      // Not converted by c10::Scalar's caster: a uint64 can have its highest bit set.
      const c10::Scalar value = py::isinstance<py::float_>(given) ? c10::Scalar(given.cast<double>())
          : py::isinstance<py::bool_>(given)                      ? c10::Scalar(given.cast<bool>())
          : PyLong_Check(given.ptr()) ? c10::Scalar(static_cast<int64_t>(PyLong_AsUnsignedLongLongMask(given.ptr())))
                                      : c10::Scalar(given.cast<double>());
      numbers_[i] = bits_of(value, *parameters[i].number, bytes);
      if (recorder != nullptr) {
        recorded_.emplace_back(Literal{numbers_[i], bytes});
      }
    }
    arguments_[i] = {&numbers_[i], bytes};
  }
}

} // namespace backplane
