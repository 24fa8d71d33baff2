#include "plans/dynamic_shape_plan.h"

#include "plans/host_functions.h"

#include <c10/util/bit_cast.h>

#include <limits>

namespace backplane {
namespace {

bool is_within(int64_t value, c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kInt:
      return value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max();
    case c10::kUInt32:
      return value >= 0 && value <= std::numeric_limits<uint32_t>::max();
    case c10::kUInt64:
      return value >= 0;
    default:
      return true;
  }
}

bool store(const Patch& patch, int64_t bits, Literal& literal) {
  if (!patch.is_float && !is_within(bits, patch.dtype)) {
    return false;
  }
  const auto number = patch.is_float ? c10::Scalar(c10::bit_cast<double>(bits)) : c10::Scalar(bits);
  literal.bits = 0;
  literal.bytes = store_number(number, patch.dtype, &literal.bits);
  return true;
}

// The arguments of a launch or library call; nullptr for other steps.
std::vector<PlannedArgument>* arguments_of(Step& step) {
  if (auto* launch = std::get_if<LaunchStep>(&step)) {
    return &launch->arguments;
  }
  auto* queued = std::get_if<LibraryStep>(&step);
  return queued != nullptr ? &queued->arguments : nullptr;
}

Address& address_of(Step& step, uint32_t index) {
  if (auto* arguments = arguments_of(step)) {
    return std::get<Address>((*arguments)[index]);
  }
  if (auto* work = std::get_if<HostCallbackStep>(&step)) {
    return work->memory[index];
  }
  auto& copy = std::get<CopyStep>(step);
  return index == 0 ? copy.destination : copy.source;
}

void set_bytes(Step& step, size_t bytes) {
  if (auto* allocate = std::get_if<AllocateStep>(&step)) {
    allocate->bytes = bytes;
  } else {
    std::get<CopyStep>(step).bytes = bytes;
  }
}

ResultTensor& tensor_of(Result& result, uint32_t element) {
  auto* one = std::get_if<ResultTensor>(&result);
  return one != nullptr ? *one : std::get<std::vector<ResultTensor>>(result)[element];
}

} // namespace

std::shared_ptr<const Plan> DynamicShapePlan::instantiate(c10::ArrayRef<int64_t> sizes) const {
  TapeProgram::Slots slots;
  if (!tape.run(sizes, slots)) {
    return nullptr;
  }
  auto made = spare_->take(); // patch() overwrites every number that depends on sizes
  if (made == nullptr) {
    made = std::make_unique<Plan>(plan);
  }
  if (!patch(slots, *made)) {
    spare_->give_back(made.release());
    return nullptr;
  }
  return {made.release(), [spare = spare_](const Plan* done) { spare->give_back(done); }};
}

bool DynamicShapePlan::patch(const TapeProgram::Slots& slots, Plan& made) const {
  std::vector<std::pair<uint32_t, std::vector<CpuOperator::Argument>>> hosted; // (step, arguments), in step order
  for (const Patch& patch : patches) {
    const int64_t value = slots[patch.slot];
    switch (patch.field) {
      case Patch::Field::Bytes:
        if (value < 1) {
          return false;
        }
        set_bytes(made.steps[patch.step], static_cast<size_t>(value));
        break;
      case Patch::Field::Offset:
        address_of(made.steps[patch.step], patch.index).offset = value;
        break;
      case Patch::Field::Number: {
        Step& step = made.steps[patch.step];
        auto* arguments = arguments_of(step);
        Literal& literal = arguments != nullptr
            ? std::get<Literal>((*arguments)[patch.index])
            : std::get<Literal>(std::get<HostCallbackStep>(step).numbers[patch.index]);
        if (!store(patch, value, literal)) {
          return false;
        }
        break;
      }
      case Patch::Field::HostSize:
      case Patch::Field::HostStride: {
        auto& step = std::get<HostCallbackStep>(made.steps[patch.step]);
        if (hosted.empty() || hosted.back().first != patch.step) {
          hosted.emplace_back(patch.step, static_cast<const CpuOperator&>(*step.function).arguments());
        }
        auto& argument = hosted.back().second[patch.index];
        auto* one = std::get_if<CpuOperator::Memory>(&argument);
        auto& memory = one != nullptr ? *one : std::get<std::vector<CpuOperator::Memory>>(argument)[patch.element];
        (patch.field == Patch::Field::HostSize ? memory.sizes : memory.strides)[patch.dimension] = value;
        break;
      }
      case Patch::Field::Items:
        if (value < 1) {
          return false;
        }
        std::get<LaunchStep>(made.steps[patch.step]).spec.global_size[patch.index] = static_cast<size_t>(value);
        break;
      case Patch::Field::Random:
        if (value < 1) {
          return false;
        }
        made.random[patch.step].count = static_cast<uint64_t>(value);
        break;
      case Patch::Field::Size:
        if (value < 0) {
          return false;
        }
        tensor_of(made.results[patch.step], patch.element).sizes[patch.index] = value;
        break;
      case Patch::Field::Stride:
        tensor_of(made.results[patch.step], patch.element).strides[patch.index] = value;
        break;
      case Patch::Field::Start:
        tensor_of(made.results[patch.step], patch.element).offset = value;
        break;
    }
  }
  for (auto& [step, arguments] : hosted) {
    auto& work = std::get<HostCallbackStep>(made.steps[step]).function;
    work = std::make_shared<CpuOperator>(static_cast<const CpuOperator&>(*work).op(), std::move(arguments));
  }
  return true;
}

} // namespace backplane
