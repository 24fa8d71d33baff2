// Calls planners in Python, and binds the runtime functions that they use (torch_backplane.planning).
#include <ATen/native/Resize.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/tensor_dtypes.h>
#include <torch/csrc/utils/tensor_layouts.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "bindings.h"
#include "devices/without_dynamo.h"
#include "plans/plan_builder.h"
#include "plans/planned_operator.h"
#include "plans/python_arguments.h"
#include "plans/python_number.h"
#include "plans/recorder.h"
#include "streams/capture.h"
#include "streams/device_errors.h"
#include "streams/stream.h"
#include "streams/submit.h"

namespace py = pybind11;

namespace backplane {
namespace {

py::object run_on_cpu_error; // torch_backplane._C.RunOnCPU
py::object refused_error; // torch_backplane._C.Refused, a subclass of RunOnCPU
py::object tracer; // torch_backplane.planning.tracing.trace

py::object dtype_object(c10::ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

// Restores the thread's stack of dispatch modes: Ctrl-C can interrupt PyTorch while it enters or leaves a mode, which
// then stays on the stack.
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

// Converts arguments to Python objects. Numbers get the same indices as in read_call (signature.cpp).
class Converter {
 public:
  explicit Converter(const PlannedCall& call) : call_(call) {}

  // All arguments of the call.
  py::tuple convert(
      const c10::FunctionSchema& schema,
      c10::ArrayRef<c10::IValue> arguments,
      const std::vector<ArgumentFacts>& facts) {
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
  explicit PythonPlanner(py::object function) : function_(function.release().ptr()) {} // never released

  PlannerResult call(
      const c10::FunctionSchema& schema,
      c10::ArrayRef<c10::IValue> arguments,
      const std::vector<ArgumentFacts>& facts,
      PlannedCall& call,
      FallbackReason& left) override {
    py::gil_scoped_acquire gil;
    const WithoutDynamo unseen;
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
          ") after it has written to an argument or taken random numbers; it must raise RunOnCPU before that");
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
    const WithoutDynamo unseen;
    const py::tuple converted = Converter(call).convert(schema, arguments, facts);
    py::list given; // (argument, whether its integers are sizes)
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
        " values, but must return ", returns.size(), " values");
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

// Launches

LaunchSpec launch_spec(const std::vector<size_t>& global_size, const std::vector<size_t>& group_size) {
  TORCH_CHECK_VALUE(
      !global_size.empty() && global_size.size() <= 3 && global_size.size() == group_size.size(),
      "global size and group size must have the same number of dimensions, 1 to 3, but got ", global_size.size(),
      " and ", group_size.size());
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

// Launches on the current stream of the kernel's device and records the launch.
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
      " arguments, but got ", values.size());
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
    stream_handle(stream); // throws in a capture: there planners only run dry, and their plans are captured
  }
  py::gil_scoped_release released; // submission can block
  submit(stream, KernelLaunch{kernel.get(), spec, given.now()});
  if (given.reports_errors()) {
    note_reporting_launch(stream);
  }
}

// Takes `count` random numbers from the generator of the call that is being planned. Returns (seed, offset).
std::pair<PythonNumber, PythonNumber> take_random(uint64_t count) {
  Recorder* recorder = Recorder::active();
  PlannerScope* scope = PlannerScope::innermost();
  TORCH_CHECK(recorder != nullptr || scope != nullptr, "random numbers can only be taken while a planner runs");
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

// Collects this thread's plan events during its lifetime, and then also appends them to the enclosing listener's
// events.
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
      "torch_backplane._C.RunOnCPU", "Raised by a planner to leave a call to the CPU. The argument is the reason.",
      PyExc_Exception, nullptr));
  module.attr("RunOnCPU") = run_on_cpu_error;
  run_on_cpu_error.inc_ref(); // must not be destroyed after the interpreter, like the registrations that use it
  refused_error = py::reinterpret_steal<py::object>(PyErr_NewExceptionWithDoc(
      "torch_backplane._C.Refused",
      "Raised by a planner for a call that is invalid whatever the tensors contain. The CPU kernel raises the error.",
      run_on_cpu_error.ptr(), nullptr));
  module.attr("Refused") = refused_error;
  refused_error.inc_ref();

  py::class_<PythonNumber>(
      module, "Number", "A passed-through number. Each call supplies its value, so planners do not see it.")
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
          "Whether it came as a tensor that takes part in type promotion as a tensor, not as a Python number.")
      .def_property_readonly("tensor", [](const PythonNumber& self) { return self.tensor; })
      .def_property_readonly(
          "kind",
          [](const PythonNumber& self) {
            const bool alone = !self.tensor.has_value();
            const bool wrapped = alone || self.tensor->unsafeGetTensorImpl()->is_wrapped_number();
            const auto dtype = alone ? self.value.type() : self.tensor->scalar_type();
            return static_cast<int>(dtype) * 4 + (alone ? 2 : 0) + (wrapped ? 1 : 0);
          },
          "A code for the combination of `dtype`, `is_dimensioned` and whether there is a `tensor`.")
      .def_property_readonly(
          "real", [](const PythonNumber& self) { return self.of_part(NumberPart::Real); },
          "The real part. Kernels take a complex number as two arguments, `real` and `imag`.")
      .def(
          "fitting",
          [](const PythonNumber& self, const py::object& dtype) {
            PythonNumber copy = self;
            copy.fits = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
            return copy;
          },
          py::arg("dtype"),
          "Return the number with a range check at each use, which raises PyTorch's RuntimeError if the dtype cannot "
          "hold it.")
      .def(
          "check",
          [](const PythonNumber& self) {
            static_cast<void>(self.passed_value());
            auto* recorder = Recorder::active();
            if (recorder != nullptr && self.call == &recorder->call()) {
              recorder->add(CheckStep{self.passed(self.fits)});
            }
          },
          "Check a `fitting` number at each call although no kernel uses it, for example if there are no elements.")
      .def_property_readonly("imag", [](const PythonNumber& self) { return self.of_part(NumberPart::Imaginary); })
      .def_property_readonly(
          "example", [](const PythonNumber& self) { return self.value; },
          "The value in the call that is being planned, for PyTorch's meta kernels only. Later calls can have other "
          "values.");

  module.def(
      "fits",
      [](const py::object& number, const py::object& dtype) {
        const c10::Scalar value = torch::jit::toIValue(number, c10::NumberType::get()).toScalar();
        try {
          check_fits(value, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
        } catch (const std::runtime_error&) { // PyTorch's error for an overflow
          return false;
        }
        return true;
      },
      py::arg("number"), py::arg("dtype"), "Return whether the dtype can hold the number; see `Number.fitting`.");

  py::class_<CompiledKernel, std::shared_ptr<CompiledKernel>>(module, "CompiledKernel", "A compiled kernel.")
      .def(
          py::init([](c10::DeviceIndex device, const py::object& code, std::string entry, std::string operator_name,
                      const std::vector<py::object>& parameters) {
            std::vector<KernelParameter> declared;
            for (const py::object& parameter : parameters) {
              if (py::isinstance<py::str>(parameter)) {
                const auto kind = parameter.cast<std::string>();
                TORCH_CHECK_VALUE(
                    kind == "input" || kind == "output",
                    "a parameter must be a dtype, \"input\" or \"output\", but got ", kind);
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
          "`code`: source text in the device's dialect, or a binary as bytes. `parameters`: the dtype of a number, "
          "\"input\" for memory, or \"output\" for memory that the kernel writes.")
      .def_property_readonly("entry", &CompiledKernel::entry)
      .def(
          "wait", [](const CompiledKernel& kernel) { device(kernel.device_index()).kernel_resources(kernel.handle()); },
          "Wait until the kernel is built. Raises RuntimeError if it could not be built.");

  module.def(
      "launch", &launch, py::arg("kernel"), py::arg("arguments"), py::arg("items"), py::arg("group"), py::kw_only(),
      py::arg("dynamic_shared_memory") = 0, py::arg("cluster") = std::vector<size_t>(), py::arg("cooperative") = false,
      "Launch a kernel on the current stream. `items`: global size; `group`: group size. `dynamic_shared_memory`: "
      "bytes per group. `cluster`: groups per cluster, in 1 to 3 dimensions. `cooperative`: all groups are resident at "
      "the same time.");
  module.def("take_random", &take_random, py::arg("count"));
  module.def(
      "watch_error_words",
      [](const at::Tensor& words, py::function read) {
        PyObject* function = read.release().ptr(); // never released
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
      py::arg("text"), "Issue a UserWarning in this call and in each replay of its plan.");
  module.def(
      "warn_of_resize",
      [](const at::Tensor& given, const std::vector<int64_t>& sizes) { at::native::resize_output_check(given, sizes); },
      py::arg("given"), py::arg("sizes"), "Issue PyTorch's warning if an `out=` tensor that has elements is resized.");
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
      py::arg("by_value") = std::vector<std::string>(), py::arg("sizes") = std::vector<std::string>(),
      py::arg("checks") = std::vector<NumberCheck>(),
      "Set an operator's planner. `checks`: tuples (argument, comparison, bound, condition), see number_checks.h.");
  module.def(
      "address_of", [](const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()); },
      py::arg("tensor"),
      "Return the address of the tensor's first element. Unlike tensor.data_ptr(), does not materialize a "
      "copy-on-write tensor.");
  module.def("advance_configuration_epoch", &advance_configuration_epoch);
  module.def(
      "float32_in_tf32",
      [] {
        const uint64_t bits = PlannerScope::read_tf32();
        return std::make_pair((bits & 1) != 0, (bits & 2) != 0);
      },
      "Return whether PyTorch lets CUDA compute float32 products and convolutions in TF32. Plans of the planners that "
      "are running are then only used while both are as they are now.");
  module.def("set_plan_mode", [](const std::string& name) {
    TORCH_CHECK_VALUE(name == "0" || name == "1" || name == "check", "plan mode must be 0, 1 or check, but got ", name);
    set_plan_mode(name == "0" ? PlanMode::Off : name == "1" ? PlanMode::On : PlanMode::Check);
  });
  module.def("set_launch_blocking", &set_launch_blocking, py::arg("blocking"));
  module.def("plan_mode", [] {
    const auto mode = plan_mode();
    return mode == PlanMode::Off ? "0" : mode == PlanMode::On ? "1" : "check";
  });
  module.def("plan_counts", [] {
    py::dict all;
    for_each_planned_operator(
        [&](PlannedOperator& planned) { all[py::str(planned.name())] = counts_of(planned.cache()); });
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
  module.def("set_tracer", [](py::object function) {
    tracer = std::move(function);
    tracer.inc_ref();
  });
  module.def(
      "clear_plans", [] { for_each_planned_operator([](PlannedOperator& planned) { planned.cache().clear(); }); });
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
