// Host callbacks for planners in Python (torch_backplane.planning.host).
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>

#include "bindings.h"
#include "plans/host_functions.h"
#include "plans/python_number.h"
#include "plans/recorder.h"
#include "python/library_symbols.h"
#include "streams/stream.h"
#include "streams/submit.h"

namespace py = pybind11;

namespace backplane {
namespace {

// Collects a callback's memory and numbers in order, both for this call and for the plan.
class Gathered {
 public:
  explicit Gathered(const char* what) : what_(what) {}

  // `written`: whether the function writes to the tensor; nullopt if unknown.
  void add(const at::Tensor& tensor, std::optional<bool> written) {
    TORCH_CHECK_TYPE(
        tensor.device().is_privateuseone(), what_, " takes bp tensors and plain values, but got a tensor on ",
        tensor.device());
    TORCH_CHECK_VALUE(
        index_ < 0 || index_ == tensor.device().index(), what_, " takes tensors on one device, but got tensors on ",
        c10::Device(c10::kPrivateUse1, index_), " and ", tensor.device());
    TORCH_CHECK_VALUE(
        !tensor.is_conj() && !tensor.is_neg(), what_,
        " takes no lazily conjugated or negated tensors; call resolve_conj() and resolve_neg() first");
    index_ = tensor.device().index();
    if (written.value_or(true)) {
      WriteWatch::wrote(tensor.storage(), /*surely=*/written.has_value());
    }
    memory_.push_back(const_cast<char*>(static_cast<const char*>(tensor.const_data_ptr())));
    if (recorder_ != nullptr) {
      step_.memory.push_back(recorder_->locate(tensor));
    }
  }

  void add(const PythonNumber& number, c10::ScalarType dtype) {
    uint64_t bits = 0;
    const uint32_t bytes = store_number(number.passed_value(), dtype, &bits);
    numbers_.push_back(bits);
    // A number of a nested call is constant in the recorded plan.
    if (recorder_ != nullptr && number.call == &recorder_->call()) {
      step_.numbers.emplace_back(number.passed(dtype));
    } else {
      step_.numbers.emplace_back(Literal{bits, bytes});
    }
  }

  CpuOperator::Number add(const PythonNumber& number) {
    if (number.value.isComplex()) {
      add(number.of_part(NumberPart::Real), c10::kDouble);
      add(number.of_part(NumberPart::Imaginary), c10::kDouble);
      return {c10::kComplexDouble};
    }
    const auto dtype = number.value.isFloatingPoint() ? c10::kDouble : c10::kLong;
    add(number, dtype);
    return {dtype};
  }

  void add(const c10::Scalar& number, c10::ScalarType dtype) {
    uint64_t bits = 0;
    const uint32_t bytes = store_number(number, dtype, &bits);
    numbers_.push_back(bits);
    step_.numbers.emplace_back(Literal{bits, bytes});
  }

  // Submits the callback to the current stream, and records it.
  void go(std::shared_ptr<const HostFunction> function) {
    TORCH_CHECK_TYPE(index_ >= 0, what_, " needs a bp tensor among its arguments");
    TORCH_CHECK(
        device(index_).host_sees_memory(), "the host cannot access the memory of ",
        c10::Device(c10::kPrivateUse1, index_), " (", device(index_).properties().name, ")");
    if (recorder_ != nullptr) {
      step_.function = function;
      recorder_->add(std::move(step_));
      if (recorder_->is_dry()) {
        return;
      }
    }
    const c10::Stream stream = current_stream(index_);
    stream_handle(stream); // throws in a capture: there host callbacks are captured as steps of plans
    const py::gil_scoped_release released; // submission can block
    submit(stream, HostCallback{std::move(function), memory_, numbers_});
  }

 private:
  const char* const what_;
  Recorder* const recorder_ = Recorder::active();
  c10::DeviceIndex index_ = -1;
  c10::SmallVector<char*, 8> memory_;
  c10::SmallVector<uint64_t, 8> numbers_;
  HostCallbackStep step_;
};

CpuOperator::Memory described(const at::Tensor& tensor) {
  return {tensor.scalar_type(), c10::DimVector(tensor.sizes()), c10::DimVector(tensor.strides())};
}

bool is_tensor_list(const py::handle& value) {
  const py::object first = first_element(value);
  return first && THPVariable_Check(first.ptr());
}

c10::OperatorHandle find(const std::string& name) {
  const auto dot = name.find('.');
  const auto op = c10::Dispatcher::singleton().findSchema(
      {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
  TORCH_CHECK_VALUE(op.has_value(), "PyTorch has no operator ", name);
  return *op;
}

// `values`: one for each argument of the schema.
void call_on_cpu(const std::string& name, const py::sequence& values) {
  const c10::OperatorHandle op = find(name);
  const auto& declared = op.schema().arguments();
  TORCH_CHECK_VALUE(
      values.size() == declared.size(), name, " takes ", declared.size(), " arguments, but got ", values.size());
  const auto writes = [](const c10::Argument& one) {
    return one.alias_info() != nullptr && one.alias_info()->isWrite();
  };
  TORCH_CHECK_VALUE(
      std::any_of(declared.begin(), declared.end(), writes), name,
      " does not write to any of its arguments; only out= variants and in-place operators are supported");
  Gathered gathered("call_on_cpu");
  std::vector<CpuOperator::Argument> arguments;
  for (size_t i = 0; i < values.size(); ++i) {
    const py::object value = values[i];
    if (THPVariable_Check(value.ptr())) {
      const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
      gathered.add(tensor, writes(declared[i]));
      arguments.emplace_back(described(tensor));
    } else if (is_tensor_list(value)) {
      std::vector<CpuOperator::Memory> list;
      for (const py::handle& element : value) {
        const auto tensor = element.cast<at::Tensor>();
        gathered.add(tensor, writes(declared[i]));
        list.push_back(described(tensor));
      }
      arguments.emplace_back(std::move(list));
    } else if (py::isinstance<PythonNumber>(value)) {
      arguments.emplace_back(gathered.add(value.cast<const PythonNumber&>()));
    } else if (is_number_list(value)) {
      std::vector<CpuOperator::Number> list;
      for (const py::handle& element : value) {
        list.push_back(gathered.add(element.cast<const PythonNumber&>()));
      }
      arguments.emplace_back(std::move(list));
    } else {
      arguments.emplace_back(torch::jit::toIValue(value, declared[i].type()));
    }
  }
  gathered.go(std::make_shared<CpuOperator>(op, std::move(arguments)));
}

c10::Scalar number(const py::object& value) {
  return py::isinstance<py::float_>(value) ? c10::Scalar(value.cast<double>()) : c10::Scalar(value.cast<int64_t>());
}

void call_library(const std::shared_ptr<LibraryFunction>& function, const py::sequence& values) {
  const auto& parameters = function->parameters();
  TORCH_CHECK_VALUE(
      values.size() == parameters.size(), function->name(), " takes ", parameters.size(), " arguments, but got ",
      values.size());
  Gathered gathered("call_library");
  for (size_t i = 0; i < values.size(); ++i) {
    const py::object value = values[i];
    if (parameters[i].kind == LibraryFunction::Kind::Memory) {
      TORCH_CHECK_TYPE(
          THPVariable_Check(value.ptr()), "argument ", i, " of ", function->name(), " must be a tensor, but got ",
          py::str(py::type::of(value)).cast<std::string>());
      gathered.add(THPVariable_Unpack(value.ptr()), /*written=*/std::nullopt);
    } else if (py::isinstance<PythonNumber>(value)) {
      gathered.add(value.cast<const PythonNumber&>(), parameters[i].dtype);
    } else {
      gathered.add(number(value), parameters[i].dtype);
    }
  }
  gathered.go(function);
}

LibraryFunction::Parameter parameter(const py::tuple& described) {
  static const std::map<std::string, LibraryFunction::Kind> kinds = {
      {"memory", LibraryFunction::Kind::Memory},
      {"value", LibraryFunction::Kind::Value},
      {"reference", LibraryFunction::Kind::Reference}};
  const auto kind = kinds.at(described[0].cast<std::string>());
  return {kind, described[1].is_none() ? c10::kByte : reinterpret_cast<THPDtype*>(described[1].ptr())->scalar_type};
}

} // namespace

void bind_host_work(py::module_& module) {
  py::class_<LibraryFunction, std::shared_ptr<LibraryFunction>>(module, "LibraryFunction")
      .def(
          py::init([](std::string name, uintptr_t address, py::object owner, const std::vector<py::tuple>& described) {
            std::vector<LibraryFunction::Parameter> parameters;
            for (const py::tuple& one : described) {
              parameters.push_back(parameter(one));
            }
            return std::make_shared<LibraryFunction>(
                library_symbol(std::move(name), address, std::move(owner)), std::move(parameters));
          }),
          py::arg("name"), py::arg("address"), py::arg("owner"), py::arg("parameters"),
          "`owner` keeps the library loaded. `parameters`: for each parameter (\"memory\", None), (\"value\", dtype) "
          "or (\"reference\", dtype).")
      .def_property_readonly("name", &LibraryFunction::name);
  module.def("call_library", &call_library, py::arg("function"), py::arg("arguments"));
  module.def("call_on_cpu", &call_on_cpu, py::arg("operator"), py::arg("arguments"));
  module.def(
      "host_sees_memory", [](c10::DeviceIndex index) { return device(index).host_sees_memory(); },
      py::arg("device_index"));
}

} // namespace backplane
