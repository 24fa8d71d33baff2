// Plans as text, for torch_backplane.plans.explain and the errors of the mode "check".
#include <c10/util/StringUtil.h>

#include "plans/plan.h"

namespace backplane {
namespace {

std::string text(const Address& address) {
  static constexpr const char* kNames[] = {"argument ", "allocation ", "kept "};
  std::string named = c10::str(kNames[static_cast<int>(address.base)], address.index);
  return address.offset == 0 ? named : c10::str(named, " + ", address.offset);
}

std::string text(const Literal& literal) {
  return c10::str(literal.bits);
}

std::string text(const PassedNumber& number) {
  static constexpr const char* kParts[] = {"", "real part of ", "imaginary part of "};
  const std::string named =
      c10::str(kParts[static_cast<int>(number.part)], "number ", number.index, " as ", number.dtype);
  return number.fits == c10::ScalarType::Undefined ? named : c10::str(named, ", if it fits ", number.fits);
}

std::string text(const AllocateStep& step) {
  return c10::str("allocate ", step.index, ": ", step.bytes, " bytes");
}

std::string text(const FreeStep& step) {
  return c10::str("free ", step.index);
}

std::string text(const std::vector<PlannedArgument>& arguments, const std::vector<KernelParameter>& parameters) {
  std::string line;
  for (size_t i = 0; i < arguments.size(); ++i) {
    line += (i > 0 ? ", " : "") + std::visit([](const auto& one) { return text(one); }, arguments[i]);
    line += parameters[i].written ? " (written)" : "";
  }
  return line;
}

std::string text(const LaunchStep& step) {
  const auto& items = step.spec.global_size;
  const auto& group = step.spec.group_size;
  std::string line = c10::str(
      "launch ", step.kernel->entry(), " on ", items[0], "×", items[1], "×", items[2], " items in groups of ", group[0],
      "×", group[1], "×", group[2], attributes_text(step.spec), ": ");
  return line + text(step.arguments, step.kernel->parameters());
}

std::string text(const LibraryStep& step) {
  return c10::str(
      "call ", step.function->text(), " on the queue with ", text(step.arguments, step.function->parameters()));
}

std::string text(const HostCallbackStep& step) {
  std::string line = c10::str("on the host ", step.function->text(), " with ");
  const char* separator = "";
  for (const Address& address : step.memory) {
    line += separator + text(address);
    separator = ", ";
  }
  for (const PlannedNumber& number : step.numbers) {
    line += separator + std::visit([](const auto& one) { return text(one); }, number);
    separator = ", ";
  }
  return line;
}

std::string text(const CopyStep& step) {
  return c10::str("copy ", step.bytes, " bytes from ", text(step.source), " to ", text(step.destination));
}

std::string text(const CheckStep& step) {
  return "check " + text(step.number);
}

std::string text(const WarnStep& step) {
  return "warn: " + step.text;
}

std::string text(const Step& step) {
  return std::visit([](const auto& one) { return text(one); }, step);
}

std::string text(const ResultTensor& result) {
  if (result.kind == ResultTensor::Kind::Undefined) {
    return "undefined";
  }
  if (result.kind == ResultTensor::Kind::Argument) {
    return c10::str("argument ", result.index);
  }
  const char* of = result.kind == ResultTensor::Kind::View ? "view of argument " : "tensor in allocation ";
  return c10::str(
      of, result.index, ", ", result.dtype, ", sizes ", c10::IntArrayRef(result.sizes), ", strides ",
      c10::IntArrayRef(result.strides), ", offset ", result.offset);
}

std::string text(const Result& result) {
  if (const auto* tensor = std::get_if<ResultTensor>(&result)) {
    return text(*tensor);
  }
  if (const auto* list = std::get_if<std::vector<ResultTensor>>(&result)) {
    std::string line = "list of:";
    for (const ResultTensor& tensor : *list) {
      line += c10::str(" (", text(tensor), ")");
    }
    return line;
  }
  return c10::str(std::get<c10::IValue>(result));
}

// The compiler's resource figures for the kernel of a launch step.
std::string resources_text(const Step& step) {
  const auto* launch = std::get_if<LaunchStep>(&step);
  if (launch == nullptr) {
    return {};
  }
  const auto number = [](const std::optional<int64_t>& value) { return value ? c10::str(*value) : "None"; };
  try {
    const auto found = device(launch->kernel->device_index()).kernel_resources(launch->kernel->handle());
    return c10::str(
        " [registers: ", number(found.registers), ", spilled bytes: ", number(found.spilled_bytes),
        ", static shared memory: ", number(found.static_shared_memory), "]");
  } catch (const std::exception& error) { // still show the plan; a failed build is reported at a synchronization
    const std::string message = error.what();
    return c10::str(" [resources unknown: ", message.substr(0, message.find('\n')), "]");
  }
}

std::vector<std::string> lines(const Plan& plan) {
  if (!plan.unplannable.empty()) {
    return {c10::str(plan.falls_back ? "not planned: " : "planned at each call: ", plan.unplannable)};
  }
  std::vector<std::string> found;
  for (const RandomUse& use : plan.random) {
    found.push_back(
        c10::str(
            "take ", use.count, " random numbers: number ", use.first_number, " and the next are seed and offset"));
  }
  for (const Step& step : plan.steps) {
    found.push_back(text(step));
  }
  for (const Result& result : plan.results) {
    found.push_back("return " + text(result));
  }
  return found;
}

} // namespace

std::string describe(const Plan& plan) {
  std::string whole;
  const auto all = lines(plan);
  for (size_t i = 0; i < all.size(); ++i) {
    const bool is_step =
        plan.unplannable.empty() && i >= plan.random.size() && i - plan.random.size() < plan.steps.size();
    whole += all[i] + (is_step ? resources_text(plan.steps[i - plan.random.size()]) : "") + "\n";
  }
  return whole;
}

std::string difference(const Plan& one, const Plan& other) {
  // The text shows everything in a plan except the identity of kernels with the same name.
  const auto ours = lines(one);
  const auto theirs = lines(other);
  for (size_t i = 0; i < std::max(ours.size(), theirs.size()); ++i) {
    const std::string& left = i < ours.size() ? ours[i] : "nothing";
    const std::string& right = i < theirs.size() ? theirs[i] : "nothing";
    if (left != right) {
      return c10::str("the plan has «", left, "», but the planner now has «", right, "»");
    }
  }
  for (size_t i = 0; i < one.steps.size(); ++i) {
    if (one.steps[i] != other.steps[i]) {
      return c10::str("«", ours[one.random.size() + i], "» uses another kernel with the same name");
    }
  }
  return {};
}

} // namespace backplane
