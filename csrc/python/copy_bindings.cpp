// Python bindings of copy_method, for traces (torch_backplane/planning/views.py).
#include <torch/csrc/utils/pybind.h>

#include "aten/copies.h"
#include "bindings.h"

namespace py = pybind11;

namespace backplane {
namespace {

class PythonFacts final : public CopyFacts {
 public:
  explicit PythonFacts(const py::object& facts) : facts_(facts) {}

  bool is_alike() const override {
    return facts_.attr("is_alike")().cast<bool>();
  }
  bool shares_storage() const override {
    return facts_.attr("shares_storage")().cast<bool>();
  }
  bool starts_alike() const override {
    return facts_.attr("starts_alike")().cast<bool>();
  }
  bool is_dense() const override {
    return facts_.attr("is_dense")().cast<bool>();
  }

 private:
  const py::object& facts_;
};

} // namespace

void bind_copies(py::module_& module) {
  py::enum_<CopyMethod>(
      module, "CopyMethod",
      "Nothing: source and destination are the same memory; Bytes: one contiguous copy; Elements: element by element.")
      .value("Nothing", CopyMethod::Nothing)
      .value("Bytes", CopyMethod::Bytes)
      .value("Elements", CopyMethod::Elements);
  module.def(
      "copy_method", [](const py::object& facts) { return copy_method(PythonFacts(facts)); }, py::arg("facts"),
      "Return how to perform a copy within a device. `facts` has the methods of CopyFacts (csrc/aten/copies.h).");
}

} // namespace backplane
