#include "plans/host_work.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Scalar.h>
#include <c10/util/bit_cast.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "devices/device.h"
#include "devices/freed_memory.h"
#include "devices/openmp.h"
#include "devices/piecewise.h"
#include "devices/profile.h"
#include "devices/verbose.h"
#include "streams/device_errors.h"
#include "streams/stream.h"

namespace backplane {
namespace {

at::Tensor tensor_at(char* memory, const CpuOperator::Memory& described) {
  return at::from_blob(memory, described.sizes, described.strides, at::TensorOptions(described.dtype));
}

// Reads a number that store_number wrote as int64 or double, and goes on behind it.
c10::Scalar next_number(const uint64_t*& numbers, c10::ScalarType dtype) {
  if (dtype == c10::kLong) {
    return static_cast<int64_t>(*numbers++);
  }
  const double value = c10::bit_cast<double>(*numbers++);
  return dtype == c10::kComplexDouble ? c10::Scalar(c10::complex<double>(value, c10::bit_cast<double>(*numbers++)))
                                      : c10::Scalar(value);
}

std::string text(const c10::IValue& value) {
  return c10::str(value);
}

std::string text(const CpuOperator::Memory& memory) {
  return c10::str(memory.dtype, " ", c10::IntArrayRef(memory.sizes), " strides ", c10::IntArrayRef(memory.strides));
}

std::string text(const CpuOperator::Number& number) {
  return c10::str("a number as ", number.dtype);
}

template <typename T>
std::string text(const std::vector<T>& list) {
  std::string line = "[";
  for (const T& one : list) {
    line += (line.size() > 1 ? ", " : "") + text(one);
  }
  return line + "]";
}

using Word = uint64_t; // what a register takes of an integer or a pointer

template <size_t... I>
void call_words(uintptr_t address, const Word* words, std::index_sequence<I...>) {
  using Function = Word (*)(decltype(static_cast<void>(I), Word{})...);
  reinterpret_cast<Function>(address)(words[I]...);
}

template <size_t Count>
void call_function(uintptr_t address, const Word* words) {
  call_words(address, words, std::make_index_sequence<Count>());
}

template <size_t... Counts>
constexpr auto callers(std::index_sequence<Counts...>) {
  return std::array{&call_function<Counts>...};
}

// A thread is handed work in 50 to 100 µs by PoCL 3.1, where its queue is empty. Longer work than a few times that is
// better done beside the program.
constexpr std::chrono::microseconds kBrief{300};

// Work on fewer elements is one thread's, also where more would do it sooner: how sums are rounded must not depend on how long
// something took.
constexpr int64_t kFewElements = 1 << 17;

int64_t elements_of(const CpuOperator::Argument& argument) {
  if (const auto* memory = std::get_if<CpuOperator::Memory>(&argument)) {
    return c10::multiply_integers(memory->sizes);
  }
  int64_t all = 0;
  if (const auto* list = std::get_if<std::vector<CpuOperator::Memory>>(&argument)) {
    for (const auto& one : *list) {
      all += c10::multiply_integers(one.sizes);
    }
  }
  return all;
}

bool is_contiguous(const CpuOperator::Memory& memory) {
  int64_t expected = 1;
  for (size_t i = memory.sizes.size(); i-- > 0;) {
    if (memory.sizes[i] != 1 && memory.strides[i] != expected) {
      return false;
    }
    expected *= memory.sizes[i];
  }
  return true;
}

// As CpuOperator::list_elements.
std::vector<int64_t> list_elements_of(const c10::OperatorHandle& op, const std::vector<CpuOperator::Argument>& arguments) {
  const auto& schema = op.schema();
  if (schema.name().rfind("aten::_foreach_", 0) != 0 || !schema.returns().empty()) {
    return {}; // those that return something add up, or make lists
  }
  std::vector<int64_t> elements;
  std::optional<c10::ScalarType> dtype;
  for (const auto& argument : arguments) {
    if (std::holds_alternative<CpuOperator::Memory>(argument)) {
      return {};
    }
    const auto* list = std::get_if<std::vector<CpuOperator::Memory>>(&argument);
    std::vector<int64_t> found;
    for (size_t i = 0; list != nullptr && i < list->size(); ++i) {
      const auto& one = (*list)[i];
      if (!is_contiguous(one) || one.dtype != dtype.value_or(one.dtype)) {
        return {};
      }
      dtype = one.dtype;
      found.push_back(c10::multiply_integers(one.sizes));
    }
    if (list != nullptr && !elements.empty() && found != elements) {
      return {};
    }
    if (list != nullptr) {
      elements = std::move(found);
    }
  }
  for (const auto& argument : arguments) {
    const auto* numbers = std::get_if<std::vector<CpuOperator::Number>>(&argument);
    if (numbers != nullptr && numbers->size() != elements.size()) {
      return {};
    }
  }
  return elements;
}

HostWork::Threads threads_for(const std::vector<CpuOperator::Argument>& arguments) {
  int64_t all = 0;
  for (const auto& argument : arguments) {
    all += elements_of(argument);
  }
  return all < kFewElements ? HostWork::Threads::One : HostWork::Threads::Team;
}

// An operator on lists, with its numbers.
class ListChange final : public Piecewise {
 public:
  ListChange(std::shared_ptr<const CpuOperator> op, std::vector<uint64_t> numbers, c10::Stream stream)
      : op_(std::move(op)), numbers_(std::move(numbers)), stream_(stream) {}

  c10::ArrayRef<int64_t> elements() const override {
    return op_->list_elements();
  }
  size_t element_bytes() const override {
    return c10::elementSize(op_->list_dtype());
  }
  void run(char* const* memory, const Piece& piece) const override {
    try {
      op_->run_piece(memory, numbers_.data(), piece);
    } catch (const std::exception& error) {
      report_error(stream_, error);
    }
  }

 private:
  const std::shared_ptr<const CpuOperator> op_;
  const std::vector<uint64_t> numbers_;
  const c10::Stream stream_;
};

constexpr auto kCallers = callers(std::make_index_sequence<LibraryFunction::kMostParameters + 1>()); // by their number

} // namespace

void CpuOperator::run(char* const* memory, const uint64_t* numbers) const {
  torch::jit::Stack stack;
  for (const Argument& argument : arguments_) {
    if (const auto* value = std::get_if<c10::IValue>(&argument)) {
      stack.push_back(*value);
    } else if (const auto* one = std::get_if<Memory>(&argument)) {
      stack.emplace_back(tensor_at(*memory++, *one));
    } else if (const auto* list = std::get_if<std::vector<Memory>>(&argument)) {
      c10::List<at::Tensor> tensors;
      for (const Memory& element : *list) {
        tensors.push_back(tensor_at(*memory++, element));
      }
      stack.emplace_back(std::move(tensors));
    } else if (const auto* number = std::get_if<Number>(&argument)) {
      stack.emplace_back(next_number(numbers, number->dtype));
    } else {
      c10::List<c10::Scalar> scalars;
      for (const Number& element : std::get<std::vector<Number>>(argument)) {
        scalars.push_back(next_number(numbers, element.dtype));
      }
      stack.emplace_back(std::move(scalars));
    }
  }
  at::AutoDispatchBelowADInplaceOrView guard; // the thread is the device's, and knows no modes
  op_.callBoxed(stack);
}

CpuOperator::CpuOperator(c10::OperatorHandle op, std::vector<Argument> arguments)
    : op_(std::move(op)),
      arguments_(std::move(arguments)),
      threads_(threads_for(arguments_)),
      list_elements_(list_elements_of(op_, arguments_)) {}

c10::ScalarType CpuOperator::list_dtype() const {
  return std::get<std::vector<Memory>>(arguments_.front()).front().dtype;
}

void CpuOperator::run_piece(char* const* memory, const uint64_t* numbers, const Piecewise::Piece& piece) const {
  torch::jit::Stack stack;
  const auto bytes = static_cast<int64_t>(c10::elementSize(list_dtype()));
  for (const Argument& argument : arguments_) {
    if (const auto* value = std::get_if<c10::IValue>(&argument)) {
      stack.push_back(*value);
    } else if (std::holds_alternative<std::vector<Memory>>(argument)) {
      c10::List<at::Tensor> tensors;
      for (size_t i = piece.first; i < piece.end; ++i) {
        const int64_t count = std::min(piece.to, list_elements_[i]) - piece.from;
        tensors.push_back(at::from_blob(memory[i] + piece.from * bytes, {count}, at::TensorOptions(list_dtype())));
      }
      memory += list_elements_.size();
      stack.emplace_back(std::move(tensors));
    } else if (const auto* number = std::get_if<Number>(&argument)) {
      stack.emplace_back(next_number(numbers, number->dtype));
    } else {
      c10::List<c10::Scalar> scalars;
      const auto& list = std::get<std::vector<Number>>(argument);
      for (size_t i = 0; i < list.size(); ++i) {
        const c10::Scalar scalar = next_number(numbers, list[i].dtype);
        if (i >= piece.first && i < piece.end) {
          scalars.push_back(scalar);
        }
      }
      stack.emplace_back(std::move(scalars));
    }
  }
  at::AutoDispatchBelowADInplaceOrView guard; // as above
  op_.callBoxed(stack);
}

std::string CpuOperator::text() const {
  std::string line = c10::str(op_.operator_name(), "(");
  const char* separator = "";
  for (const Argument& argument : arguments_) {
    line += separator + std::visit([](const auto& one) { return backplane::text(one); }, argument);
    separator = ", ";
  }
  return line + ")";
}

LibraryFunction::LibraryFunction(LibrarySymbol symbol, std::vector<Parameter> parameters)
    : symbol_(std::move(symbol)), parameters_(std::move(parameters)) {
  TORCH_CHECK_VALUE(symbol_.address != 0, "a library function needs its address, and ", name(), " has none");
  TORCH_CHECK_VALUE(
      parameters_.size() <= kMostParameters, name(), " has ", parameters_.size(), " parameters, and ", kMostParameters,
      " is the most that can be passed");
  for (const Parameter& parameter : parameters_) {
    TORCH_CHECK_TYPE(
        parameter.kind != Kind::Value || c10::isIntegralType(parameter.dtype, /*includeBool=*/false), name(),
        " cannot take a number of dtype ", parameter.dtype, " by value: only integers are passed so");
  }
}

void LibraryFunction::run(char* const* memory, const uint64_t* numbers) const {
  std::array<Word, kMostParameters> words{};
  for (size_t i = 0; i < parameters_.size(); ++i) {
    words[i] = parameters_[i].kind == Kind::Memory ? reinterpret_cast<Word>(*memory++)
        : parameters_[i].kind == Kind::Value       ? *numbers++
                                                   : reinterpret_cast<Word>(numbers++);
  }
  kCallers[parameters_.size()](symbol_.address, words.data());
}

std::string LibraryFunction::text() const {
  return c10::str(name(), " at ", symbol_.address);
}

void do_on_host(
    c10::Stream stream,
    std::shared_ptr<const HostWork> work,
    c10::ArrayRef<char*> memory,
    c10::ArrayRef<uint64_t> numbers) {
  keep_freed_memory();
  const int threads = work->threads() == HostWork::Threads::Its ? 0
      : work->threads() == HostWork::Threads::One               ? 1
                                                                : at::get_num_threads(); // of the program's thread
  if (threads > 1) {
    give_up_team(); // there should be one
  }
  const bool brief = threads <= 1 && work->last_time() < kBrief;
  const StreamHandle handle = stream_handle(stream);
  const ProfiledCommand profiled(Activity::Kind::HostStep, stream.device_index(), handle, work->name());
  const bool is_large = work->threads() == HostWork::Threads::Team;
  if (auto op = std::dynamic_pointer_cast<const CpuOperator>(work);
      op != nullptr && is_large && !op->list_elements().empty() && !is_verbose()) { // which says how long each one takes
    const auto lists = std::make_shared<ListChange>(std::move(op), numbers.vec(), stream);
    const auto alone = [lists, count = memory.size()](char* const* seen) {
      run_piece_by_piece(PiecewiseCall{lists.get(), {seen, count}});
    };
    device(stream.device_index()).call_host({alone, threads, brief, lists}, memory, handle);
    return;
  }
  device(stream.device_index())
      .call_host(
          {[work = std::move(work), numbers = numbers.vec(), stream](char* const* seen) {
             const auto start = std::chrono::steady_clock::now();
             try {
               said(
                   [&] { work->run(seen, numbers.data()); },
                   [&] { return c10::str("bp:", static_cast<int>(stream.device_index()), " host ", work->text()); });
             } catch (const std::exception& error) {
               report_error(stream, error);
             }
             work->took(std::chrono::steady_clock::now() - start);
           },
           threads, brief},
          memory, handle);
}

} // namespace backplane
