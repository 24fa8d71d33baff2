// Library functions that planners call to enqueue commands on the device's queue
// (torch_backplane.planning.queue_functions).
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "devices/queue_function.h"
#include "devices/verbose.h"
#include "plans/python_arguments.h"
#include "python/library_symbols.h"
#include "streams/device_errors.h"
#include "streams/stream.h"
#include "streams/submit.h"

namespace py = pybind11;

namespace backplane {
namespace {

// Wraps the Python function that describes a status. If it raises, returns its error as text, so that the status itself
// is still reported.
QueueFunction::Explain explanation(py::object function) {
  if (function.is_none()) {
    return nullptr;
  }
  const LibrarySymbol kept = library_symbol("", 0, std::move(function));
  return [kept](int status) -> std::string {
    if (!Py_IsInitialized()) {
      return {};
    }
    const py::gil_scoped_acquire gil;
    const py::error_scope others;
    try {
      return py::str(py::handle(static_cast<PyObject*>(kept.owner.get()))(status));
    } catch (const py::error_already_set& error) {
      return c10::str("unknown, because explain raised ", error.what());
    }
  };
}

// The device of the first tensor argument.
c10::DeviceIndex device_of(const QueueFunction& function, const py::sequence& values) {
  const auto& parameters = function.parameters();
  TORCH_CHECK_VALUE(
      values.size() == parameters.size(), function.name(), " takes ", parameters.size(), " arguments, but got ",
      values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const py::object value = values[i];
    if (!parameters[i].number.has_value() && THPVariable_Check(value.ptr())) {
      const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
      TORCH_CHECK_VALUE(
          tensor.device().is_privateuseone(), "argument ", i, " of function ", function.name(), " is on ",
          tensor.device(), ", but must be on a bp device");
      return tensor.device().index();
    }
  }
  TORCH_CHECK_TYPE(false, function.name(), " needs a bp tensor among its arguments");
}

// Calls the function in stream order on the current stream of the tensors' device, and records the call.
void call_on_queue(const std::shared_ptr<QueueFunction>& function, const py::sequence& values) {
  const c10::DeviceIndex index = device_of(*function, values);
  PythonArguments given("function", function->name(), index, function->parameters(), values);
  Device& owner = device(index);
  TORCH_CHECK(
      !owner.queue_api().empty(), function->name(), " cannot be called on bp:", static_cast<int>(index), " (",
      owner.properties().name, "): library calls need a driver with a native launcher, which provides the queue");
  if (Recorder* recorder = Recorder::active()) {
    recorder->add(LibraryStep{function, given.take_recorded(), given.reports_errors()});
    if (recorder->is_dry()) {
      return;
    }
  }
  const auto* scope = PlannerScope::innermost();
  const bool is_named = scope != nullptr && scope->call().operator_name != nullptr;
  const std::string caller = is_named ? *scope->call().operator_name : "no operator";
  const c10::Stream stream = current_stream(index);
  stream_handle(stream); // throws in a capture: there library calls are captured as steps of plans
  const py::gil_scoped_release released; // the library can block
  submit(stream, LibraryCall{function.get(), &caller, given.now()});
  if (given.reports_errors()) {
    note_reporting_launch(stream);
  }
}

std::vector<KernelParameter> parameters_of(const std::vector<py::object>& described) {
  std::vector<KernelParameter> parameters;
  for (const py::object& one : described) {
    if (THPDtype_Check(one.ptr())) {
      const auto dtype = reinterpret_cast<THPDtype*>(one.ptr())->scalar_type;
      uint64_t bits = 0;
      store_number(0, dtype, &bits); // throws for a dtype that parameters cannot have
      parameters.push_back({dtype});
    } else {
      parameters.push_back({std::nullopt, one.cast<std::string>() == "output"});
    }
  }
  return parameters;
}

} // namespace

void bind_queue_functions(py::module_& module) {
  py::class_<QueueFunction, std::shared_ptr<QueueFunction>>(module, "QueueFunction")
      .def(
          py::init([](std::string name, uintptr_t address, py::object owner, const std::vector<py::object>& parameters,
                      py::object explain) {
            return std::make_shared<QueueFunction>(
                library_symbol(std::move(name), address, std::move(owner)), parameters_of(parameters),
                explanation(std::move(explain)));
          }),
          py::arg("name"), py::arg("address"), py::arg("owner"), py::arg("parameters"), py::arg("explain"),
          "`owner` keeps the library loaded. `parameters`: the dtype of a number; \"input\" or \"output\" for memory.")
      .def_property_readonly("name", &QueueFunction::name);
  module.def("set_verbose", &set_verbose, py::arg("on"), "Set whether each library call is printed with its time.");
  module.def("is_verbose", &is_verbose);
  module.def("call_on_queue", &call_on_queue, py::arg("function"), py::arg("arguments"));
  module.def("queue_api", [](c10::DeviceIndex index) { return device(index).queue_api(); }, py::arg("device_index"));
}

} // namespace backplane
