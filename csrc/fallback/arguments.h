// Helpers for the tensors in an operator's boxed arguments and results.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <utility>
#include <vector>

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

// Whether an operator of another library can have tensors inside: a dictionary, a tuple, or a list of such or of lists.
inline bool is_nested(const c10::IValue& value) {
  if (value.isList()) {
    const auto elements = value.toListRef();
    return !elements.empty() && (elements[0].isList() || is_nested(elements[0]));
  }
  return value.isGenericDict() || value.isTuple();
}

// Replaces each element of a nested value by `replacement(element)`.
template <typename Replacement>
c10::IValue with_elements_replaced(const c10::IValue& value, const Replacement& replacement) {
  if (value.isList()) {
    c10::impl::GenericList list(value.toList().elementType());
    for (const c10::IValue& element : value.toListRef()) {
      list.push_back(replacement(element));
    }
    return list;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      elements.push_back(replacement(element));
    }
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  const auto given = value.toGenericDict();
  c10::impl::GenericDict dict(given.keyType(), given.valueType());
  for (const auto& entry : given) {
    dict.insert(entry.key(), replacement(entry.value()));
  }
  return dict;
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
  } else if (is_nested(value)) {
    with_elements_replaced(value, [&](const c10::IValue& element) {
      for_each_tensor(element, function);
      return element;
    });
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
  } else if (is_nested(value)) {
    value = with_elements_replaced(value, [&](c10::IValue element) {
      replace_tensors(element, device, replacement);
      return element;
    });
  }
}

} // namespace backplane
