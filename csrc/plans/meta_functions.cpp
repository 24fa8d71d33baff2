// PyTorch's meta functions for planners in Python: computing a call's results, and converting its arguments to meta
// tensors.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <unordered_map>

#include "bindings.h"
#include "fallback/structured_meta.h"
#include "plans/python_number.h"

namespace py = pybind11;

namespace backplane {
namespace {

py::tuple results_of(const std::string& name, const py::args& given) {
  static auto* operators = new std::unordered_map<std::string, c10::OperatorHandle>; // under the GIL
  const c10::KernelFunction* kernel = structured_meta(name);
  TORCH_CHECK_VALUE(kernel != nullptr, name, " has no structured meta function");
  auto found = operators->find(name);
  if (found == operators->end()) {
    const auto dot = name.find('.');
    found = operators
                ->emplace(
                    name,
                    c10::Dispatcher::singleton().findSchemaOrThrow(
                        name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.substr(dot + 1).c_str()))
                .first;
  }
  const c10::OperatorHandle& op = found->second;
  const auto& schema = op.schema().arguments();
  TORCH_CHECK_VALUE(given.size() == schema.size(), name, " takes ", schema.size(), " arguments");
  torch::jit::Stack stack;
  stack.reserve(schema.size());
  for (size_t i = 0; i < schema.size(); ++i) {
    const py::handle one = PyTuple_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i));
    if (THPVariable_Check(one.ptr())) {
      stack.emplace_back(THPVariable_Unpack(one.ptr()));
    } else {
      stack.push_back(torch::jit::toIValue(one, schema[i].type()));
    }
  }
  kernel->callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  py::tuple results(stack.size());
  for (size_t i = 0; i < stack.size(); ++i) {
    results[i] = torch::jit::toPyObject(std::move(stack[i]));
  }
  return results;
}

// Replaces tensors by meta tensors. Tensors that share a storage still share one, and a tensor that is given twice
// becomes one meta tensor: PyTorch refuses to resize an `out=` that is also an operand.
class Metas {
 public:
  explicit Metas(const py::handle& values) {
    count(values);
  }

  py::list list(const py::handle& values) {
    const auto sequence =
        py::reinterpret_steal<py::object>(PySequence_Fast(values.ptr(), "expected a list or a tuple"));
    py::list made(PySequence_Fast_GET_SIZE(sequence.ptr()));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.ptr()); ++i) {
      made[i] = one(PySequence_Fast_GET_ITEM(sequence.ptr(), i));
    }
    return made;
  }

 private:
  static bool is_list(const py::handle& value) {
    return PyList_Check(value.ptr()) || PyTuple_Check(value.ptr());
  }

  void count(const py::handle& values) {
    for (const py::handle& value : values) {
      if (THPVariable_Check(value.ptr())) {
        const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
        auto& found = known_[tensor.unsafeGetTensorImpl()];
        if (!found.has_value()) {
          found.emplace();
          ++users_[tensor.storage().unsafeGetStorageImpl()];
        }
      } else if (is_list(value)) {
        count(value);
      }
    }
  }

  py::object one(const py::handle& value) {
    if (THPVariable_Check(value.ptr())) {
      const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
      at::Tensor& made = *known_.at(tensor.unsafeGetTensorImpl());
      if (!made.defined()) {
        made = meta_of(tensor);
      }
      return py::cast(made);
    }
    if (value.is_none() || PyBool_Check(value.ptr()) || PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr())) {
      return py::reinterpret_borrow<py::object>(value);
    }
    if (is_list(value)) {
      return list(value);
    }
    if (py::isinstance<PythonNumber>(value)) {
      const auto& number = value.cast<const PythonNumber&>();
      return number.tensor.has_value() ? py::cast(*number.tensor) : py::cast(number.value);
    }
    if (THPDevice_Check(value.ptr())) {
      return py::reinterpret_steal<py::object>(THPDevice_New(c10::Device(c10::kMeta)));
    }
    if (THPGenerator_Check(value.ptr())) {
      return py::none();
    }
    return py::reinterpret_borrow<py::object>(value);
  }

  at::Tensor meta_of(const at::Tensor& tensor) {
    const c10::Storage& storage = tensor.storage();
    if (users_.at(storage.unsafeGetStorageImpl()) == 1) {
      return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
    }
    c10::Storage& shared = shared_[storage.unsafeGetStorageImpl()];
    if (!shared) {
      shared = c10::Storage(
          c10::Storage::use_byte_size_t(), storage.nbytes(), c10::GetAllocator(c10::kMeta), /*resizable=*/true);
    }
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(shared), c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return made;
  }

  std::unordered_map<const c10::TensorImpl*, std::optional<at::Tensor>> known_;
  std::unordered_map<const c10::StorageImpl*, size_t> users_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> shared_;
};

// New tensors on a bp device with the meta tensors' sizes, strides and dtypes; None for None.
py::list new_like(const py::sequence& metas, c10::DeviceIndex index) {
  py::list made(metas.size());
  for (size_t i = 0; i < metas.size(); ++i) {
    const py::object one = metas[i];
    if (one.is_none()) {
      made[i] = py::none();
      continue;
    }
    const at::Tensor& meta = THPVariable_Unpack(one.ptr());
    made[i] = py::cast(
        at::empty_strided(
            meta.sizes(), meta.strides(), at::TensorOptions(meta.dtype()).device(c10::kPrivateUse1, index)));
  }
  return made;
}

} // namespace

void bind_planner_metas(py::module_& module) {
  module.def(
      "has_structured_meta", [](const std::string& name) { return structured_meta(name) != nullptr; }, py::arg("name"));
  module.def(
      "structured_meta", &results_of, py::arg("name"),
      "Return the results, as meta tensors, of an overload such as \"aten::add.out\", given all its arguments in "
      "schema order (tensors: meta). Raises PyTorch's errors for invalid arguments.");
  module.def(
      "as_metas", [](const py::sequence& values) { return Metas(values).list(values); }, py::arg("values"),
      "Convert a planner's arguments for PyTorch's meta kernels: tensors to meta tensors, passed-through numbers to "
      "their values in this call, generators to None.");
  module.def(
      "new_like", &new_like, py::arg("metas"), py::arg("index"),
      "Return uninitialized tensors on bp:index with the sizes, strides and dtypes of meta tensors; None for None.");
}

} // namespace backplane
