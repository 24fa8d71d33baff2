#include "plans/host_functions.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Scalar.h>
#include <c10/util/StringUtil.h>
#include <c10/util/bit_cast.h>

#include <array>
#include <utility>

namespace backplane {
namespace {

at::Tensor tensor_at(char* memory, const CpuOperator::Memory& described) {
  return at::from_blob(memory, described.sizes, described.strides, at::TensorOptions(described.dtype));
}

// Reads a number that store_number wrote as int64 or double, and advances the pointer.
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

using Word = uint64_t; // wide enough for an integer or a pointer

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

constexpr auto kCallers = callers(std::make_index_sequence<LibraryFunction::kMaxParameters + 1>()); // by arity

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
  at::AutoDispatchBelowADInplaceOrView guard; // a thread of the device does not have the caller's dispatch state
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
      parameters_.size() <= kMaxParameters, name(), " has ", parameters_.size(), " parameters, but at most ",
      kMaxParameters, " are supported");
  for (const Parameter& parameter : parameters_) {
    TORCH_CHECK_TYPE(
        parameter.kind != Kind::Value || c10::isIntegralType(parameter.dtype, /*includeBool=*/false), name(),
        " cannot take a number of dtype ", parameter.dtype, " by value: only integers can be passed by value");
  }
}

void LibraryFunction::run(char* const* memory, const uint64_t* numbers) const {
  std::array<Word, kMaxParameters> words{};
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

} // namespace backplane
