// Planners in Python: how they are called, and what they may ask of the runtime meanwhile (torch_backplane.planning).
#include <ATen/native/Resize.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/tensor_dtypes.h>
#include <torch/csrc/utils/tensor_layouts.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "plans/python_arguments.h"
#include "plans/plan_builder.h"
#include "plans/planned_operator.h"
#include "plans/python_number.h"
#include "plans/recorder.h"
#include "bindings.h"
#include "streams/capture.h"
#include "streams/device_errors.h"
#include "streams/stream.h"
#include "streams/submit.h"

namespace py = pybind11;

namespace backplane {
namespace {

py::object run_on_cpu_error; // torch_backplane._C.RunOnCPU
py::object refused_error; // torch_backplane._C.Refused, which is one
py::object tracer; // torch_backplane.planning.tracing.trace

py::object dtype_object(c10::ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

// Ctrl-C may meet PyTorch's code that enters a mode or leaves it, and the mode stays then: this restores the thread's.
class DispatchModes {
 public:
  DispatchModes() = default;
  DispatchModes(const DispatchModes&) = delete;
  DispatchModes& operator=(const DispatchModes&) = delete;
  ~DispatchModes() {
    if (c10::impl::TorchDispatchModeTLS::stack_len() != length_) {
      c10::impl::TorchDispatchModeTLS::set_state(std::move(before_));
    }
  }

 private:
  int64_t length_ = c10::impl::TorchDispatchModeTLS::stack_len();
  c10::impl::TorchDispatchModeTLS before_ = c10::impl::TorchDispatchModeTLS::get_state();
};

// Arguments as Python objects; counts the numbers as read_call (signature.cpp) does.
class Converter {
 public:
  explicit Converter(const PlannedCall& call) : call_(call) {}

  // All arguments of the call.
  py::tuple convert(
      const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments, const std::vector<ArgumentFacts>& facts) {
    py::tuple converted(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      converted[i] = convert(arguments[i], schema.arguments()[i], facts[i]);
    }
    return converted;
  }

 private:
  py::object convert(const c10::IValue& value, const c10::Argument& argument, const ArgumentFacts& facts) {
    if (value.isInt()) {
      const auto* optional = argument.real_type()->castRaw<c10::OptionalType>();
      const auto kind = (optional != nullptr ? *optional->getElementType() : *argument.real_type()).kind();
      if (kind == c10::TypeKind::ScalarTypeType) {
        return dtype_object(static_cast<c10::ScalarType>(value.toInt()));
      }
      if (kind == c10::TypeKind::LayoutType) {
        return py::reinterpret_borrow<py::object>(
            reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<c10::Layout>(value.toInt()))));
      }
      if (kind == c10::TypeKind::MemoryFormatType) {
        return py::reinterpret_steal<py::object>(
            torch::utils::getTHPMemoryFormat(static_cast<c10::MemoryFormat>(value.toInt())));
      }
    }
    return convert(value, facts);
  }

  py::object convert(const c10::IValue& value, const ArgumentFacts& facts) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined()) {
        return py::none();
      }
      return tensor.device().is_privateuseone() ? py::cast(tensor) : number(tensor);
    }
    if (value.isList()) {
      py::list list;
      for (const c10::IValue& element : value.toListRef()) {
        list.append(convert(element, facts));
      }
      return list;
    }
    if (facts.passed_through && value.isScalar()) {
      return number(std::nullopt);
    }
    return torch::jit::toPyObject(value);
  }

  py::object number(std::optional<at::Tensor> tensor) {
    const uint32_t index = next_++;
    return py::cast(PythonNumber{call_.numbers[index], &call_, index, std::move(tensor)});
  }

  const PlannedCall& call_;
  uint32_t next_ = 0;
};

class PythonPlanner final : public Planner {
 public:
  explicit PythonPlanner(py::object function) : function_(function.release().ptr()) {} // kept as long as the process

  PlannerResult call(
      const c10::FunctionSchema& schema,
      c10::ArrayRef<c10::IValue> arguments,
      const std::vector<ArgumentFacts>& facts,
      PlannedCall& call,
      LeftToCpu& left) override {
    py::gil_scoped_acquire gil;
    const PlannerScope scope(schema, arguments, call);
    const py::tuple converted = Converter(call).convert(schema, arguments, facts);
    try {
      return results(schema, py::reinterpret_borrow<py::object>(function_)(*converted));
    } catch (py::error_already_set& error) {
      if (!error.matches(run_on_cpu_error)) {
        throw;
      }
      left.reason = py::str(error.value());
      left.refused = error.matches(refused_error);
      TORCH_CHECK(
          !scope.has_effect(), "the planner of ", schema.operator_name(), " leaves the call to the CPU (", left.reason,
          ") after it has written to an argument or taken random numbers: it has to decide before");
      return std::nullopt;
    }
  }

  std::optional<DynamicShapePlan> trace(
      const c10::FunctionSchema& schema,
      c10::ArrayRef<c10::IValue> arguments,
      const std::vector<ArgumentFacts>& facts,
      PlannedCall& call,
      std::string& reason) override {
    py::gil_scoped_acquire gil;
    const py::tuple converted = Converter(call).convert(schema, arguments, facts);
    py::list given; // each argument with whether it is a size
    for (const py::handle& one : converted) {
      given.append(py::make_tuple(one, facts[given.size()].is_size));
    }
    py::object builder = new_plan_builder(call);
    const DispatchModes unchanged;
    reason = tracer(py::reinterpret_borrow<py::object>(function_), given, builder, schema.returns().size())
                 .cast<std::string>();
    if (!reason.empty()) {
      return std::nullopt;
    }
    return finished_plan(builder);
  }

 private:
  static std::vector<c10::IValue> results(const c10::FunctionSchema& schema, const py::object& returned) {
    const auto& returns = schema.returns();
    if (returns.empty()) {
      return {};
    }
    if (returns.size() == 1) {
      return {value(returned, returns[0])};
    }
    std::vector<c10::IValue> values;
    const auto sequence = returned.cast<py::sequence>();
    TORCH_CHECK_TYPE(
        sequence.size() == returns.size(), "the planner of ", schema.name(), " returned ", sequence.size(),
        " values, and ", returns.size(), " are needed");
    for (size_t i = 0; i < returns.size(); ++i) {
      values.push_back(value(sequence[i], returns[i]));
    }
    return values;
  }

  static c10::IValue value(const py::handle& object, const c10::Argument& declared) {
    if (object.is_none() && declared.type()->kind() == c10::TypeKind::TensorType) {
      return at::Tensor();
    }
    return torch::jit::toIValue(object, declared.type());
  }

  PyObject* const function_;
};

// --- launches

LaunchSpec launch_spec(const std::vector<size_t>& global_size, const std::vector<size_t>& group_size) {
  TORCH_CHECK_VALUE(
      !global_size.empty() && global_size.size() <= 3 && global_size.size() == group_size.size(),
      "a launch has a global size of 1 to 3 dimensions and a group size of as many, and got ", global_size.size(), " and ",
      group_size.size());
  LaunchSpec spec;
  for (size_t i = 0; i < global_size.size(); ++i) {
    TORCH_CHECK_VALUE(
        group_size[i] > 0 && global_size[i] > 0 && global_size[i] % group_size[i] == 0, "global size ", global_size[i],
        " is not a positive multiple of group size ", group_size[i]);
    spec.global_size[i] = global_size[i];
    spec.group_size[i] = group_size[i];
  }
  return spec;
}

// Launches on the current stream of the kernel's device, and has it recorded.
void launch(
    const std::shared_ptr<CompiledKernel>& kernel,
    const py::sequence& values,
    const std::vector<size_t>& global_size,
    const std::vector<size_t>& group_size,
    size_t dynamic_shared_memory,
    const std::vector<size_t>& cluster,
    bool cooperative) {
  const auto& parameters = kernel->parameters();
  TORCH_CHECK_VALUE(
      values.size() == parameters.size(), "kernel ", kernel->entry(), " takes ", parameters.size(),
      " arguments, and got ", values.size());
  LaunchSpec spec = launch_spec(global_size, group_size);
  set_attributes(spec, dynamic_shared_memory, cluster, cooperative);
  PythonArguments given("kernel", kernel->entry(), kernel->device_index(), parameters, values);
  if (Recorder* recorder = Recorder::active()) {
    recorder->add(LaunchStep{kernel, spec, given.take_recorded(), given.reports_errors()});
    if (recorder->is_dry()) {
      return;
    }
  }
  const c10::Stream stream = current_stream(kernel->device_index());
  if (PlannerScope::innermost() != nullptr) {
    stream_handle(stream); // refuses in a capture, where planners run dry and their plans are captured
  }
  py::gil_scoped_release released; // the device may have to wait
  submit(stream, KernelLaunch{kernel.get(), spec, given.now()});
  if (given.reports_errors()) {
    note_reporting_launch(stream);
  }
}

// (seed, offset) for `count` random numbers of the generator of the call that is being planned.
std::pair<PythonNumber, PythonNumber> take_random(uint64_t count) {
  Recorder* recorder = Recorder::active();
  PlannerScope* scope = PlannerScope::innermost();
  TORCH_CHECK(
      recorder != nullptr || scope != nullptr, "random numbers are taken by planners, and none is running");
  PlannerScope::took_random_numbers();
  const PlannedCall* call = recorder != nullptr ? &recorder->call() : &scope->call();
  uint32_t first = 0;
  if (recorder != nullptr) {
    first = recorder->take_random(count);
  } else {
    first = static_cast<uint32_t>(scope->call().numbers.size());
    take_random_numbers(scope->call(), count);
  }
  return {
      PythonNumber{call->numbers[first], call, first, std::nullopt},
      PythonNumber{call->numbers[first + 1], call, first + 1, std::nullopt}};
}

// Listens in this thread while it exists. Who listened before listens again afterwards, and hears all of it.
class Listening {
 public:
  Listening() : outer_(listen(&events_)) {}
  ~Listening() {
    listen(outer_);
    if (outer_ != nullptr) {
      outer_->insert(outer_->end(), events_.begin(), events_.end());
    }
  }
  Listening(const Listening&) = delete;
  Listening& operator=(const Listening&) = delete;

  const std::vector<PlanEvent>& events() const {
    return events_;
  }

 private:
  std::vector<PlanEvent> events_;
  std::vector<PlanEvent>* const outer_;
};

py::dict counts_of(const PlanCache& cache) {
  const PlanCounts counts = cache.counts();
  py::dict found;
  found["plans"] = counts.plans;
  found["replays"] = counts.replays;
  found["planner_calls"] = counts.planner_calls;
  found["unplannable_calls"] = counts.unplannable_calls;
  found["evictions"] = counts.evictions;
  found["reasons"] = cache.reasons();
  found["dynamic_shape_replays"] = counts.dynamic_shape_replays;
  found["traces"] = counts.traces;
  found["classes"] = counts.classes;
  found["dynamic_shape_classes"] = counts.dynamic_shape_classes;
  found["reasons_for_exact"] = cache.reasons_for_exact();
  return found;
}

} // namespace

void bind_plans(py::module_& module) {
  run_on_cpu_error = py::reinterpret_steal<py::object>(PyErr_NewExceptionWithDoc(
      "torch_backplane._C.RunOnCPU", "Raised by a planner that leaves a call to the CPU; the argument is the reason.",
      PyExc_Exception, nullptr));
  module.attr("RunOnCPU") = run_on_cpu_error;
  run_on_cpu_error.inc_ref(); // outlives the interpreter, like the registrations that use it
  refused_error = py::reinterpret_steal<py::object>(PyErr_NewExceptionWithDoc(
      "torch_backplane._C.Refused",
      "Raised by a planner for a call that PyTorch refuses, whatever memory holds: the CPU has the words for the error.",
      run_on_cpu_error.ptr(), nullptr));
  module.attr("Refused") = refused_error;
  refused_error.inc_ref();

  py::class_<PythonNumber>(module, "Number", "A number that plans pass through: its value is not known when planning.")
      .def_property_readonly(
          "dtype",
          [](const PythonNumber& self) {
            return dtype_object(self.tensor.has_value() ? self.tensor->scalar_type() : self.value.type());
          })
      .def_property_readonly(
          "is_dimensioned",
          [](const PythonNumber& self) {
            return self.tensor.has_value() && !self.tensor->unsafeGetTensorImpl()->is_wrapped_number();
          },
          "It came in a tensor that the user made, which takes part in type promotion as one.")
      .def_property_readonly("tensor", [](const PythonNumber& self) { return self.tensor; })
      .def_property_readonly(
          "kind",
          [](const PythonNumber& self) {
            const bool alone = !self.tensor.has_value();
            const bool wrapped = alone || self.tensor->unsafeGetTensorImpl()->is_wrapped_number();
            const auto dtype = alone ? self.value.type() : self.tensor->scalar_type();
            return static_cast<int>(dtype) * 4 + (alone ? 2 : 0) + (wrapped ? 1 : 0);
          },
          "Equal where `dtype` and `is_dimensioned` are, and whether there is a `tensor`.")
      .def_property_readonly(
          "real", [](const PythonNumber& self) { return self.of_part(NumberPart::Real); },
          "What kernels take of it where they compute in complex numbers, together with `imag`.")
      .def(
          "fitting",
          [](const PythonNumber& self, const py::object& dtype) {
            PythonNumber copy = self;
            copy.fits = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
            return copy;
          },
          py::arg("dtype"),
          "The number, checked whenever it is passed on: PyTorch's RuntimeError where it is beyond the dtype.")
      .def(
          "check",
          [](const PythonNumber& self) {
            static_cast<void>(self.passed_value());
            auto* recorder = Recorder::active();
            if (recorder != nullptr && self.call == &recorder->call()) {
              recorder->add(CheckStep{self.passed(self.fits)});
            }
          },
          "Checks a number that is `fitting` and not passed on, where there are no elements to compute, in each call.")
      .def_property_readonly("imag", [](const PythonNumber& self) { return self.of_part(NumberPart::Imaginary); })
      .def_property_readonly(
          "example",
          [](const PythonNumber& self) { return self.value; },
          "Its value in the call that is being planned. Another call may have another one: for PyTorch's meta kernels only.");

  module.def(
      "fits",
      [](const py::object& number, const py::object& dtype) {
        const c10::Scalar value = torch::jit::toIValue(number, c10::NumberType::get()).toScalar();
        try {
          check_fits(value, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
        } catch (const std::runtime_error&) { // what PyTorch raises of an overflow
          return false;
        }
        return true;
      },
      py::arg("number"), py::arg("dtype"), "Whether PyTorch takes a number as a dtype, as `Number.fitting` has it.");

  py::class_<CompiledKernel, std::shared_ptr<CompiledKernel>>(module, "CompiledKernel", "A compiled kernel.")
      .def(
          py::init([](c10::DeviceIndex device, const py::object& code, std::string entry, std::string operator_name,
                      const std::vector<py::object>& parameters) {
            std::vector<KernelParameter> declared;
            for (const py::object& parameter : parameters) {
              if (py::isinstance<py::str>(parameter)) {
                const auto kind = parameter.cast<std::string>();
                TORCH_CHECK_VALUE(
                    kind == "input" || kind == "output", "memory is input or output, and got ", kind);
                declared.push_back({std::nullopt, kind == "output"});
              } else {
                declared.push_back({reinterpret_cast<THPDtype*>(parameter.ptr())->scalar_type});
              }
            }
            KernelSource source{
                code.cast<std::string>(), std::move(entry), std::move(operator_name), py::isinstance<py::bytes>(code)};
            return std::make_shared<CompiledKernel>(device, std::move(source), std::move(declared));
          }),
          py::arg("device"), py::arg("code"), py::arg("entry"), py::arg("operator_name"), py::arg("parameters"),
          "`code`: text in the device's dialect, or a binary as bytes. `parameters`: the dtype of each number; for memory "
          "\"input\", or \"output\" where the kernel writes to it.")
      .def_property_readonly("entry", &CompiledKernel::entry);

  module.def(
      "launch", &launch, py::arg("kernel"), py::arg("arguments"), py::arg("items"), py::arg("group"), py::kw_only(),
      py::arg("dynamic_shared_memory") = 0, py::arg("cluster") = std::vector<size_t>(), py::arg("cooperative") = false,
      "`dynamic_shared_memory`: bytes per group. `cluster`: groups per cluster, in 1 to 3 dimensions. `cooperative`: all "
      "groups are resident at the same time.");
  module.def("take_random", &take_random, py::arg("count"));
  module.def(
      "watch_error_words",
      [](const at::Tensor& words, py::function read) {
        PyObject* function = read.release().ptr(); // lives as long as the process
        watch_error_words(words, [function](const std::vector<int32_t>& found) {
          py::gil_scoped_acquire gil;
          const auto error = py::reinterpret_borrow<py::object>(function)(found);
          return ReportedError{py::isinstance(error, PyExc_IndexError), py::str(error)};
        });
      },
      py::arg("words"), py::arg("read"));
  module.def("keep_in_plan", [](const at::Tensor& tensor) {
    if (auto* recorder = Recorder::active()) {
      recorder->keep(tensor);
    }
  });
  module.def(
      "warn",
      [](const std::string& text) {
        Recorder* recorder = Recorder::active();
        if (recorder != nullptr) {
          recorder->add(WarnStep{text});
        }
        if (recorder == nullptr || !recorder->is_dry()) {
          TORCH_WARN(text);
        }
      },
      py::arg("text"), "A UserWarning, in this call and in each replay of its plan.");
  module.def(
      "warn_of_resize",
      [](const at::Tensor& given, const std::vector<int64_t>& sizes) { at::native::resize_output_check(given, sizes); },
      py::arg("given"), py::arg("sizes"), "PyTorch's word of warning, where an `out=` of some elements is resized.");
  module.def("not_replayable", [](std::string reason) {
    if (auto* recorder = Recorder::active()) {
      recorder->cannot_replay(std::move(reason));
    }
  });

  module.def(
      "set_planner",
      [](const std::string& name, py::object planner, const std::vector<std::string>& passed_through,
         const std::vector<std::string>& by_value, const std::vector<std::string>& sizes,
         const std::vector<NumberCheck>& checks) {
        planned_operator(name).set_planner(
            std::make_unique<PythonPlanner>(std::move(planner)), passed_through, by_value, sizes, checks);
      },
      py::arg("name"), py::arg("planner"), py::arg("passed_through") = std::vector<std::string>(),
      py::arg("by_value") = std::vector<std::string>(), py::arg("sizes") = std::vector<std::string>(), py::arg("checks") = std::vector<NumberCheck>(),
      "`checks`: (argument, comparison, number or argument) for each, as number_checks.h has it.");
  module.def(
      "address_of", [](const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()); },
      py::arg("tensor"),
      "Of the tensor's first element. Unlike tensor.data_ptr(), it leaves memory that is shared lazily shared.");
  module.def("advance_configuration_epoch", &advance_configuration_epoch);
  module.def("set_plan_mode", [](const std::string& name) {
    TORCH_CHECK_VALUE(name == "0" || name == "1" || name == "check", "plans are 0, 1 or check, and got ", name);
    set_plan_mode(name == "0" ? PlanMode::Off : name == "1" ? PlanMode::On : PlanMode::Check);
  });
  module.def("set_launch_blocking", &set_launch_blocking, py::arg("blocking"));
  module.def("plan_mode", [] {
    const auto mode = plan_mode();
    return mode == PlanMode::Off ? "0" : mode == PlanMode::On ? "1" : "check";
  });
  module.def("plan_counts", [] {
    py::dict all;
    for_each_planned_operator([&](PlannedOperator& planned) { all[py::str(planned.name())] = counts_of(planned.cache()); });
    return all;
  });
  module.def(
      "time_plan",
      [](const std::string& name, const py::args& given, size_t times) {
        const auto dot = name.find('.');
        const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
            name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
        std::vector<c10::IValue> arguments;
        for (size_t i = 0; i < given.size(); ++i) {
          arguments.push_back(torch::jit::toIValue(given[i], op.schema().arguments()[i].type()));
        }
        PlannedOperator::Times found;
        {
          py::gil_scoped_release released;
          found = planned_operator(name).time(arguments, times);
        }
        py::dict seconds;
        seconds["call"] = found.call;
        seconds["signature"] = found.signature;
        seconds["allocation"] = found.allocation;
        seconds["launch"] = found.launch;
        seconds["results"] = found.results;
        return seconds;
      },
      py::arg("name"), py::kw_only(), py::arg("times"));
  module.def("set_tracer", [](py::object function) { tracer = std::move(function); tracer.inc_ref(); });
  module.def("clear_plans", [] {
    for_each_planned_operator([](PlannedOperator& planned) { planned.cache().clear(); });
  });
  module.def("listen_to_plans", [](const py::function& function) {
    const Listening listening;
    function();
    py::list found;
    for (const PlanEvent& event : listening.events()) {
      found.append(py::make_tuple(event.operator_name, event.arguments, event.outcome, event.plan));
    }
    return found;
  });
}

} // namespace backplane
