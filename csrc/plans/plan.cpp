#include "plans/plan.h"

#include <ATen/core/Generator.h>
#include <ATen/core/List.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "c10/generator.h"
#include "c10/storage.h"
#include "memory/allocator.h"
#include "streams/capture.h"
#include "streams/device_errors.h"
#include "streams/stream.h"
#include "streams/submit.h"

namespace backplane {
namespace {

uint32_t store_passed(const PlannedCall& call, const PassedNumber& passed, uint64_t* bits) {
  const c10::Scalar& number = call.numbers[passed.index];
  check_fits(number, passed.fits);
  return store_number(part_of(number, passed.part), passed.dtype, bits);
}

// The state of one replay: its memory, stream and submitter.
class Replay {
 public:
  Replay(const Plan& plan, PlannedCall& call)
      : plan_(plan),
        call_(call),
        stream_(current_stream(call.device)),
        submitter_(stream_),
        storages_(plan.allocations) {
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      // PlannedOperator::answer has already unshared written arguments that were copy-on-write.
      arguments_.push_back(static_cast<char*>(const_cast<void*>(call.tensors[i]->const_data_ptr())));
    }
  }

  void run(const AllocateStep& step) {
    storages_[step.index] = make_storage(call_.device, step.bytes);
  }

  void run(const FreeStep& step) {
    storages_[step.index] = c10::Storage();
  }

  void run(const LaunchStep& step) {
    submit_with_arguments(step, [&](c10::ArrayRef<KernelArgument> arguments) -> Command {
      return KernelLaunch{step.kernel.get(), step.spec, arguments};
    });
  }

  void run(const LibraryStep& step) {
    submit_with_arguments(step, [&](c10::ArrayRef<KernelArgument> arguments) -> Command {
      return LibraryCall{step.function.get(), call_.operator_name, arguments};
    });
  }

  void run(const HostCallbackStep& step) {
    c10::SmallVector<char*, 8> memory;
    for (const Address& address : step.memory) {
      memory.push_back(resolve(address));
    }
    c10::SmallVector<uint64_t, 8> numbers(step.numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (const auto* literal = std::get_if<Literal>(&step.numbers[i])) {
        numbers[i] = literal->bits;
      } else {
        store_passed(call_, std::get<PassedNumber>(step.numbers[i]), &numbers[i]);
      }
    }
    submitter_.submit(HostCallback{step.function, memory, numbers}, random_numbers(step.numbers));
  }

  void run(const CopyStep& step) {
    submitter_.submit(Copy{resolve(step.destination), resolve(step.source), step.bytes, CopyKind::WithinDevice});
  }

  void run(const CheckStep& step) {
    check_fits(call_.numbers[step.number.index], step.number.fits);
  }

  void run(const WarnStep& step) {
    TORCH_WARN(step.text);
  }

  at::Tensor result(const ResultTensor& result) {
    switch (result.kind) {
      case ResultTensor::Kind::Undefined:
        return {};
      case ResultTensor::Kind::Argument:
        return *call_.tensors[result.index];
      case ResultTensor::Kind::View: {
        const at::Tensor& base = *call_.tensors[result.index];
        return make_tensor(
            base.storage(), c10::scalarTypeToTypeMeta(result.dtype), result.sizes, result.strides,
            base.storage_offset() * static_cast<int64_t>(base.itemsize()) /
                    static_cast<int64_t>(c10::elementSize(result.dtype)) +
                result.offset);
      }
      case ResultTensor::Kind::New:
        return make_tensor(
            result.index < 0 ? make_storage(call_.device, 0) : storages_[result.index],
            c10::scalarTypeToTypeMeta(result.dtype), result.sizes, result.strides, result.offset);
    }
    return {};
  }

 private:
  // Submits the command that `make` builds from the step's resolved arguments.
  template <typename Step, typename Make>
  void submit_with_arguments(const Step& step, const Make& make) {
    c10::SmallVector<KernelArgument, 24> arguments(step.arguments.size());
    c10::SmallVector<uint64_t, 24> numbers(step.arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      const PlannedArgument& argument = step.arguments[i];
      if (const auto* address = std::get_if<Address>(&argument)) {
        arguments[i] = {resolve(*address), 0};
      } else if (const auto* literal = std::get_if<Literal>(&argument)) {
        arguments[i] = {&literal->bits, literal->bytes};
      } else {
        const auto& passed = std::get<PassedNumber>(argument);
        arguments[i] = {&numbers[i], store_passed(call_, passed, &numbers[i])};
      }
    }
    submitter_.submit(make(arguments), random_numbers(step.arguments));
    if (step.reports_errors) {
      note_reporting_launch(stream_);
    }
  }

  char* resolve(const Address& address) const {
    switch (address.base) {
      case Address::Base::Argument:
        return arguments_[address.index] + address.offset;
      case Address::Base::Allocation:
        return static_cast<char*>(storages_[address.index].mutable_data()) + address.offset;
      case Address::Base::Kept:
        break;
    }
    return static_cast<char*>(plan_.kept[address.index].mutable_data_ptr()) + address.offset;
  }

  // The step's seeds and offsets, if the stream is being captured; otherwise empty. In a capture, take_random_numbers
  // stores the result of Capture::take_random in place of seed and offset. These pairs follow the passed-through
  // numbers.
  template <typename Number>
  c10::SmallVector<RandomNumber, 4> random_numbers(const std::vector<Number>& numbers) const {
    c10::SmallVector<RandomNumber, 4> found;
    if (C10_LIKELY(submitter_.capture() == nullptr)) {
      return found;
    }
    for (size_t i = 0; i < numbers.size(); ++i) {
      const auto* number = std::get_if<PassedNumber>(&numbers[i]);
      if (number == nullptr || number->index < plan_.numbers) {
        continue;
      }
      const bool is_offset = (number->index - plan_.numbers) % 2 == 1;
      const uint32_t first = number->index - (is_offset ? 1 : 0);
      found.push_back(
          {static_cast<uint32_t>(i), number->dtype, static_cast<uint32_t>(call_.numbers[first].toLong()), is_offset,
           static_cast<uint64_t>(call_.numbers[first + 1].toLong())});
    }
    return found;
  }

  const Plan& plan_;
  PlannedCall& call_;
  const c10::Stream stream_;
  const Submitter submitter_;
  c10::SmallVector<char*, 8> arguments_;
  c10::SmallVector<c10::Storage, 4> storages_;
};

} // namespace

c10::Scalar part_of(const c10::Scalar& number, NumberPart part) {
  if (part == NumberPart::Whole || (part == NumberPart::Real && !number.isComplex())) {
    return number;
  }
  const auto whole = number.toComplexDouble();
  return part == NumberPart::Real ? whole.real() : whole.imag();
}

void take_random_numbers(PlannedCall& call, uint64_t count) {
  const bool given = call.generator != nullptr && call.generator->isGenerator();
  at::Generator generator = given ? call.generator->toGenerator() : default_generator(call.device);
  TORCH_CHECK(
      generator.device().type() == c10::kPrivateUse1, "Expected a 'bp' device type for generator but found '",
      generator.device().type(), "'");
  if (const auto capture = Capture::of(current_stream(call.device)); C10_UNLIKELY(capture != nullptr)) {
    const auto [index, beyond] = capture->take_random(generator, PhiloxGenerator::taken(count));
    call.numbers.push_back(static_cast<int64_t>(index));
    call.numbers.push_back(static_cast<int64_t>(beyond));
    return;
  }
  std::lock_guard<std::mutex> guard(generator.mutex());
  const auto state = generator.get<PhiloxGenerator>()->advance(count);
  call.numbers.push_back(static_cast<int64_t>(state.seed));
  call.numbers.push_back(static_cast<int64_t>(state.offset));
}

void check_numbers(const Plan& plan, const PlannedCall& call) {
  const auto check = [&](const auto& argument) {
    if (const auto* passed = std::get_if<PassedNumber>(&argument); passed != nullptr && passed->index < plan.numbers) {
      uint64_t bits = 0;
      store_passed(call, *passed, &bits);
    }
  };
  for (const Step& step : plan.steps) {
    if (const auto* launch = std::get_if<LaunchStep>(&step)) {
      std::for_each(launch->arguments.begin(), launch->arguments.end(), check);
    } else if (const auto* queued = std::get_if<LibraryStep>(&step)) {
      std::for_each(queued->arguments.begin(), queued->arguments.end(), check);
    } else if (const auto* work = std::get_if<HostCallbackStep>(&step)) {
      std::for_each(work->numbers.begin(), work->numbers.end(), check);
    } else if (const auto* one = std::get_if<CheckStep>(&step)) {
      check_fits(call.numbers[one->number.index], one->number.fits);
    }
  }
}

c10::SmallVector<c10::IValue, 2> replay(const Plan& plan, PlannedCall& call) {
  for (const RandomUse& use : plan.random) {
    take_random_numbers(call, use.count);
  }
  Replay running(plan, call);
  for (const Step& step : plan.steps) {
    std::visit([&](const auto& one) { running.run(one); }, step);
  }
  c10::SmallVector<c10::IValue, 2> results;
  for (const Result& result : plan.results) {
    if (const auto* tensor = std::get_if<ResultTensor>(&result)) {
      results.emplace_back(running.result(*tensor));
    } else if (const auto* list = std::get_if<std::vector<ResultTensor>>(&result)) {
      c10::List<at::Tensor> tensors;
      tensors.reserve(list->size());
      for (const ResultTensor& tensor : *list) {
        tensors.push_back(running.result(tensor));
      }
      results.emplace_back(std::move(tensors));
    } else {
      results.push_back(std::get<c10::IValue>(result));
    }
  }
  return results;
}

} // namespace backplane
