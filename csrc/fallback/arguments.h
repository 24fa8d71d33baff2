// Helpers for the tensors in an operator's boxed arguments and results.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <utility>

namespace backplane {

// Whether the operator writes to the argument, according to its schema or where PyTorch's schema is known to be
// incomplete.
inline bool is_written(const c10::FunctionSchema& schema, const c10::Argument& argument) {
  // In training, batch normalization updates its running statistics, but these schemas do not declare it.
  const bool is_undeclared =
      (schema.name() == "aten::native_batch_norm" || schema.name() == "aten::batch_norm_update_stats") &&
      (argument.name() == "running_mean" || argument.name() == "running_var");
  const auto* alias = argument.alias_info();
  return (alias != nullptr && alias->isWrite()) || is_undeclared;
}

inline bool is_optional_tensor_list(const c10::IValue& value) {
  if (!value.isList() || value.isTensorList()) {
    return false;
  }
  const auto elements = value.toListRef();
  return !elements.empty() && (elements[0].isTensor() || elements[0].isNone());
}

// Calls `function` with each defined tensor. Lists of optional tensors can contain undefined tensors instead of None.
template <typename Function>
void for_each_tensor(const c10::IValue& value, const Function& function) {
  const auto if_defined = [&](const at::Tensor& tensor) {
    if (tensor.defined()) {
      function(tensor);
    }
  };
  if (value.isTensor()) {
    if_defined(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if_defined(tensor);
    }
  } else if (is_optional_tensor_list(value)) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor()) {
        if_defined(element.toTensor());
      }
    }
  }
}

// Replaces each tensor, defined or not, by `replacement(tensor)`, and a bp device by `device`.
template <typename Replacement>
void replace_tensors(c10::IValue& value, c10::Device device, const Replacement& replacement) {
  if (value.isTensor()) {
    value = replacement(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> replaced;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      replaced.push_back(replacement(tensor));
    }
    value = std::move(replaced);
  } else if (is_optional_tensor_list(value)) {
    c10::List<std::optional<at::Tensor>> replaced;
    for (const c10::IValue& element : value.toListRef()) {
      replaced.push_back(
          element.isTensor() ? std::optional<at::Tensor>(replacement(element.toTensor())) : std::nullopt);
    }
    value = std::move(replaced);
  } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
    value = device;
  }
}

} // namespace backplane
