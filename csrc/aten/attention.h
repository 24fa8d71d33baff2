// The choice between fused and composite attention (attention.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace backplane {

// Why attention of bp tensors uses the composite form; empty if it is fused.
std::string why_attention_is_composed(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout_p,
    bool enable_gqa);

} // namespace backplane
