// Which attention there is (attention.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace backplane {

// Why attention of bp tensors is composed of products and a softmax; empty where it is fused.
std::string why_attention_is_composed(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout_p,
    bool enable_gqa);

} // namespace backplane
