// The builder with which a trace (torch_backplane.planning.tracing) writes a dynamic-shape plan.
#include <ATen/ScalarOps.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <numeric>

#include "bindings.h"
#include "plans/host_functions.h"
#include "plans/plan_builder.h"
#include "plans/planned_operator.h"
#include "plans/python_number.h"
#include "streams/device_errors.h"

namespace py = pybind11;

namespace backplane {
namespace {

c10::ScalarType dtype_of(const py::handle& dtype) {
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

// A constant, or a number computed from sizes, which Python passes as (its value in this call, its tape slot).
struct Quantity {
  c10::Scalar value;
  std::optional<uint32_t> slot;

  Quantity(c10::Scalar value, std::optional<uint32_t> slot) : value(std::move(value)), slot(slot) {}
  explicit Quantity(const py::handle& given) {
    py::object number = py::reinterpret_borrow<py::object>(given);
    if (py::isinstance<py::tuple>(given)) {
      const auto pair = py::reinterpret_borrow<py::tuple>(given);
      number = pair[0];
      slot = pair[1].cast<uint32_t>();
    }
    if (py::isinstance<py::float_>(number)) {
      value = number.cast<double>();
    } else if (py::isinstance<py::bool_>(number)) {
      value = number.cast<bool>();
    } else {
      value = static_cast<int64_t>(PyLong_AsUnsignedLongLongMask(number.ptr()));
      if (PyErr_Occurred() != nullptr) {
        throw py::error_already_set();
      }
    }
  }
  int64_t integer() const {
    return value.toLong();
  }
};

} // namespace

// Records steps in the order in which the planner performs them. Memory is a tuple (base, index, offset), where base is
// "argument", "allocation" or "kept".
class PlanBuilder {
 public:
  explicit PlanBuilder(PlannedCall& call) : call_(call) {
    built_.plan.numbers = static_cast<uint32_t>(call.numbers.size());
  }

  uint32_t instruction(const std::string& operation, uint32_t a, uint32_t b, int64_t constant) {
    return tape_.append({tape_operation(operation), a, b, constant});
  }

  uint32_t allocate(const py::handle& bytes) {
    const Quantity wanted(bytes);
    patch(Patch::Field::Bytes, 0, wanted);
    built_.plan.steps.emplace_back(AllocateStep{built_.plan.allocations, static_cast<size_t>(wanted.integer())});
    return built_.plan.allocations++;
  }

  void free(uint32_t index) {
    built_.plan.steps.emplace_back(FreeStep{index});
  }

  void launch(
      const std::shared_ptr<CompiledKernel>& kernel,
      const py::sequence& values,
      const py::sequence& items,
      const std::vector<size_t>& group,
      size_t dynamic_shared_memory,
      const std::vector<size_t>& cluster,
      bool cooperative) {
    LaunchStep step{kernel, {}, {}, false};
    set_attributes(step.spec, dynamic_shared_memory, cluster, cooperative);
    for (size_t i = 0; i < items.size(); ++i) {
      const py::object given = items[i];
      const Quantity count(given);
      patch(Patch::Field::Items, i, count);
      step.spec.global_size[i] = static_cast<size_t>(count.integer());
      step.spec.group_size[i] = group[i];
    }
    give(kernel->parameters(), values, step);
    built_.plan.steps.emplace_back(std::move(step));
  }

  void call_on_queue(const std::shared_ptr<QueueFunction>& function, const py::sequence& values) {
    LibraryStep step{function, {}, false};
    give(function->parameters(), values, step);
    built_.plan.steps.emplace_back(std::move(step));
  }

  void call_library(const std::shared_ptr<LibraryFunction>& function, const py::sequence& values) {
    HostCallbackStep step{function, {}, {}};
    const auto& parameters = function->parameters();
    for (size_t i = 0; i < values.size(); ++i) {
      const py::object value = values[i];
      if (parameters[i].kind == LibraryFunction::Kind::Memory) {
        step.memory.push_back(address(value, step.memory.size()));
      } else {
        const PlannedArgument passed = number(value, step.numbers.size(), parameters[i].dtype);
        if (const auto* literal = std::get_if<Literal>(&passed)) {
          step.numbers.emplace_back(*literal);
        } else {
          step.numbers.emplace_back(std::get<PassedNumber>(passed));
        }
      }
    }
    built_.plan.steps.emplace_back(std::move(step));
  }

  // `values`: one for each argument of the schema. A tensor is a tuple (memory, dtype, sizes, strides), a list of
  // tensors a list of such tuples.
  void call_on_cpu(const std::string& name, const py::sequence& values) {
    const auto dot = name.find('.');
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
    HostCallbackStep step;
    std::vector<CpuOperator::Argument> arguments;
    const auto number_of = [&](const py::object& value) {
      const auto& given = value.cast<const PythonNumber&>();
      TORCH_CHECK_TYPE(!given.value.isComplex(), "complex arguments of host callbacks cannot be traced");
      const auto dtype = given.value.isFloatingPoint() ? c10::kDouble : c10::kLong;
      const PlannedArgument passed = number(value, step.numbers.size(), dtype);
      step.numbers.push_back(
          std::holds_alternative<Literal>(passed) ? PlannedNumber(std::get<Literal>(passed))
                                                  : PlannedNumber(std::get<PassedNumber>(passed)));
      return CpuOperator::Number{dtype};
    };
    for (size_t i = 0; i < values.size(); ++i) {
      const py::object value = values[i];
      if (py::isinstance<py::tuple>(value)) {
        arguments.emplace_back(host_memory(value.cast<py::tuple>(), step, i, 0));
      } else if (
          py::isinstance<py::list>(value) && py::len(value) > 0 &&
          py::isinstance<py::tuple>(py::object(value.cast<py::list>()[0]))) {
        std::vector<CpuOperator::Memory> list;
        for (const py::handle& one : value) {
          list.push_back(host_memory(one.cast<py::tuple>(), step, i, list.size()));
        }
        arguments.emplace_back(std::move(list));
      } else if (py::isinstance<PythonNumber>(value)) {
        arguments.emplace_back(number_of(value));
      } else if (is_number_list(value)) {
        std::vector<CpuOperator::Number> list;
        for (const py::handle& one : value) {
          list.push_back(number_of(py::reinterpret_borrow<py::object>(one)));
        }
        arguments.emplace_back(std::move(list));
      } else {
        arguments.emplace_back(torch::jit::toIValue(value, op.schema().arguments()[i].type()));
      }
    }
    step.function = std::make_shared<CpuOperator>(op, std::move(arguments));
    built_.plan.steps.emplace_back(std::move(step));
  }

  void copy(const py::handle& destination, const py::handle& source, const py::handle& bytes) {
    const Quantity count(bytes);
    patch(Patch::Field::Bytes, 0, count);
    built_.plan.steps.emplace_back(
        CopyStep{address(destination, 0), address(source, 1), static_cast<size_t>(count.integer())});
  }

  void check(const PythonNumber& number) {
    if (number.call == &call_) {
      built_.plan.steps.emplace_back(CheckStep{number.passed(number.fits)});
    } else {
      checked_now(number);
    }
  }

  // Returns seed and offset, which get the next two indices of the call's numbers.
  std::pair<PythonNumber, PythonNumber> random(const py::handle& count) {
    const Quantity wanted(count);
    const auto first = static_cast<uint32_t>(call_.numbers.size());
    if (wanted.slot.has_value()) {
      built_.patches.push_back(
          {Patch::Field::Random, static_cast<uint32_t>(built_.plan.random.size()), 0, *wanted.slot});
    }
    built_.plan.random.push_back({static_cast<uint64_t>(wanted.integer()), first});
    call_.numbers.resize(first + 2);
    return {
        PythonNumber{call_.numbers[first], &call_, first, std::nullopt},
        PythonNumber{call_.numbers[first + 1], &call_, first + 1, std::nullopt}};
  }

  uint32_t keep(const at::Tensor& tensor) {
    built_.plan.kept.push_back(tensor);
    return static_cast<uint32_t>(built_.plan.kept.size() - 1);
  }

  // Adds one result of the schema. `described`: a tensor's description (see `tensor` below), or a list of them.
  void result(const py::object& described, const std::string& kind) {
    if (kind == "tensor") {
      built_.plan.results.emplace_back(tensor(described, 0));
    } else {
      std::vector<ResultTensor> list;
      for (const py::handle& one : described) {
        list.push_back(tensor(one, static_cast<uint32_t>(list.size())));
      }
      built_.plan.results.emplace_back(std::move(list));
    }
  }

  DynamicShapePlan take() {
    std::vector<uint32_t*> wanted;
    for (Patch& patch : built_.patches) {
      wanted.push_back(&patch.slot);
    }
    built_.tape = tape_.compile(wanted);
    return std::move(built_);
  }

 private:
  void patch(
      Patch::Field field, size_t index, const Quantity& number, c10::ScalarType dtype = c10::ScalarType::Undefined) {
    if (number.slot.has_value()) {
      built_.patches.push_back(
          {field, static_cast<uint32_t>(built_.plan.steps.size()), static_cast<uint32_t>(index), *number.slot, dtype,
           number.value.isFloatingPoint()});
    }
  }

  // Adds the arguments of a launch or library call.
  template <typename Step>
  void give(const std::vector<KernelParameter>& parameters, const py::sequence& values, Step& step) {
    for (size_t i = 0; i < values.size(); ++i) {
      const py::object value = values[i];
      if (parameters[i].number.has_value()) {
        step.arguments.push_back(number(value, i, *parameters[i].number));
      } else {
        const Address where = address(value, i);
        step.reports_errors |= where.base == Address::Base::Kept && are_error_words(built_.plan.kept[where.index]);
        step.arguments.emplace_back(where);
      }
    }
  }

  PlannedArgument number(const py::object& value, size_t index, c10::ScalarType dtype) {
    if (py::isinstance<PythonNumber>(value)) {
      const auto& number = value.cast<const PythonNumber&>();
      if (number.call == &call_) {
        return number.passed(dtype);
      }
      const c10::Scalar now = checked_now(number);
      if (number.slot.has_value()) {
        patch(Patch::Field::Number, index, Quantity{number.value, number.slot}, dtype);
      }
      uint64_t bits = 0;
      const auto bytes = store_number(now, dtype, &bits);
      return Literal{bits, bytes};
    }
    const Quantity known(value);
    patch(Patch::Field::Number, index, known, dtype);
    uint64_t bits = 0;
    const auto bytes = store_number(known.value, dtype, &bits);
    return Literal{bits, bytes};
  }

  // The value of a number that a planner passes to a nested operator. The range of a number that is computed from sizes
  // is checked only now, so the dtype has to hold every size.
  static c10::Scalar checked_now(const PythonNumber& number) {
    const bool any_fits = number.fits == c10::ScalarType::Undefined || number.fits == c10::kLong ||
        number.fits == c10::kFloat || number.fits == c10::kDouble;
    TORCH_CHECK(
        !number.slot.has_value() || (any_fits && number.part == NumberPart::Whole),
        "a number computed from sizes would need a range check at every call, which plans do not have, for dtype ",
        number.fits);
    return number.passed_value();
  }

  CpuOperator::Memory host_memory(const py::tuple& described, HostCallbackStep& step, size_t argument, size_t element) {
    step.memory.push_back(address(py::object(described[0]), step.memory.size()));
    CpuOperator::Memory memory{dtype_of(py::object(described[1])), {}, {}};
    const auto add = [&](const py::object& numbers, Patch::Field field, c10::DimVector& found) {
      for (const py::handle& one : numbers) {
        const Quantity known(one);
        if (known.slot.has_value()) {
          built_.patches.push_back(
              {field, static_cast<uint32_t>(built_.plan.steps.size()), static_cast<uint32_t>(argument), *known.slot,
               c10::ScalarType::Undefined, false, static_cast<uint32_t>(element), static_cast<uint32_t>(found.size())});
        }
        found.push_back(known.integer());
      }
    };
    add(py::object(described[2]), Patch::Field::HostSize, memory.sizes);
    add(py::object(described[3]), Patch::Field::HostStride, memory.strides);
    return memory;
  }

  Address address(const py::handle& memory, size_t index) {
    const auto described = memory.cast<py::tuple>();
    const auto base = described[0].cast<std::string>();
    const py::object given = described[2];
    const Quantity offset(given);
    patch(Patch::Field::Offset, index, offset);
    return {
        base == "argument"         ? Address::Base::Argument
            : base == "allocation" ? Address::Base::Allocation
                                   : Address::Base::Kept,
        described[1].cast<uint32_t>(), offset.integer()};
  }

  // `described`: None, an argument's index, or (base, index, dtype, sizes, strides, offset).
  ResultTensor tensor(const py::handle& described, uint32_t element) {
    ResultTensor result;
    if (described.is_none()) {
      return result;
    }
    if (py::isinstance<py::int_>(described)) {
      result.kind = ResultTensor::Kind::Argument;
      result.index = described.cast<int32_t>();
      return result;
    }
    const auto parts = described.cast<py::tuple>();
    result.kind = parts[0].cast<std::string>() == "argument" ? ResultTensor::Kind::View : ResultTensor::Kind::New;
    result.index = parts[1].cast<int32_t>();
    result.dtype = dtype_of(py::object(parts[2]));
    const auto add = [&](const py::handle& given, Patch::Field field, size_t index) {
      const Quantity number(given);
      if (number.slot.has_value()) {
        built_.patches.push_back(
            {field, static_cast<uint32_t>(built_.plan.results.size()), static_cast<uint32_t>(index), *number.slot,
             c10::ScalarType::Undefined, false, element});
      }
      return number.integer();
    };
    size_t at = 0;
    for (const py::handle& size : py::object(parts[3])) {
      result.sizes.push_back(add(size, Patch::Field::Size, at++));
    }
    at = 0;
    for (const py::handle& stride : py::object(parts[4])) {
      result.strides.push_back(add(stride, Patch::Field::Stride, at++));
    }
    result.offset = add(py::object(parts[5]), Patch::Field::Start, 0);
    return result;
  }

  PlannedCall& call_;
  DynamicShapePlan built_; // its tape is not compiled yet: until take(), patches refer to the slots of tape_
  Tape tape_;
};

py::object new_plan_builder(PlannedCall& call) {
  return py::cast(std::make_unique<PlanBuilder>(call));
}

DynamicShapePlan finished_plan(const py::object& builder) {
  return builder.cast<PlanBuilder&>().take();
}

void bind_plan_builder(py::module_& module) {
  module.def(
      "run_tape",
      [](const std::vector<std::tuple<std::string, uint32_t, uint32_t, int64_t>>& instructions,
         const std::vector<int64_t>& sizes) -> std::optional<std::vector<int64_t>> {
        Tape tape;
        for (const auto& [operation, a, b, constant] : instructions) {
          TORCH_CHECK_INDEX(
              operation != "size" || a < sizes.size(), "there are ", sizes.size(), " sizes, but got index ", a);
          tape.append({tape_operation(operation), a, b, constant});
        }
        std::vector<uint32_t> places(tape.slots());
        std::iota(places.begin(), places.end(), 0);
        std::vector<uint32_t*> wanted;
        for (uint32_t& place : places) {
          wanted.push_back(&place);
        }
        TapeProgram::Slots slots;
        if (!tape.compile(wanted).run(sizes, slots)) {
          return std::nullopt;
        }
        std::vector<int64_t> found;
        for (const uint32_t place : places) {
          found.push_back(slots[place]);
        }
        return found;
      },
      py::arg("instructions"), py::arg("sizes"),
      "Run a tape of instructions (operation, a, b, constant) and return the values of its slots, or None if a guard "
      "does not hold or a result overflows.");
  py::class_<PlanBuilder>(
      module, "PlanBuilder",
      "Builds a dynamic-shape plan. Each number is a constant, or (its value in this call, its slot on the tape).")
      .def(
          "instruction", &PlanBuilder::instruction, py::arg("operation"), py::arg("a") = 0, py::arg("b") = 0,
          py::arg("constant") = 0)
      .def("allocate", [](PlanBuilder& self, const py::object& bytes) { return self.allocate(bytes); })
      .def("free", &PlanBuilder::free)
      .def("launch", &PlanBuilder::launch)
      .def("call_on_queue", &PlanBuilder::call_on_queue)
      .def("call_library", &PlanBuilder::call_library)
      .def("call_on_cpu", &PlanBuilder::call_on_cpu)
      .def(
          "copy",
          [](PlanBuilder& self, const py::object& to, const py::object& from, const py::object& bytes) {
            self.copy(to, from, bytes);
          })
      .def("check", &PlanBuilder::check)
      .def(
          "number",
          [](PlanBuilder&, const py::object& value, bool for_tensor) {
            const Quantity known(value);
            PythonNumber number{known.value, nullptr, 0, std::nullopt};
            if (for_tensor) {
              number.tensor = at::native::wrapped_scalar_tensor(known.value);
            }
            number.slot = known.slot;
            return number;
          },
          py::arg("value"), py::arg("for_tensor") = false,
          "Return a Number for a value that a planner passes to a nested operator. `for_tensor`: the operator takes a "
          "tensor there.")
      .def("random", [](PlanBuilder& self, const py::object& count) { return self.random(count); })
      .def("keep", &PlanBuilder::keep)
      .def("result", &PlanBuilder::result);
}

} // namespace backplane
