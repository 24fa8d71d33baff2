// RMS norm for calls that no planner handles. PyTorch's forward is composite, and its backward has no CPU kernel.
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_rms_norm_compositeimplicitautograd_dispatch.h>
#include <torch/library.h>

#include <numeric>

namespace backplane {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using RmsNormResults = std::tuple<at::Tensor, at::Tensor>;

// Returns the result, and the reciprocal of the root mean square, which is float32 for 16-bit inputs.
RmsNormResults fused_rms_norm(
    const at::Tensor& input,
    at::IntArrayRef normalized_shape,
    const OptionalTensor& weight,
    std::optional<double> eps) {
  return at::compositeimplicitautograd::_fused_rms_norm(input, normalized_shape, weight, eps);
}

RmsNormResults fused_rms_norm_backward(
    const at::Tensor& grad,
    const at::Tensor& input,
    at::IntArrayRef normalized_shape,
    const at::Tensor& rstd,
    const OptionalTensor& weight,
    std::array<bool, 2> mask) {
  const bool weighted = weight && weight->defined();
  const auto compute = at::toOpMathType(input.scalar_type());
  std::vector<int64_t> outer(input.dim() - normalized_shape.size()), inner(normalized_shape.size());
  std::iota(outer.begin(), outer.end(), 0);
  std::iota(inner.begin(), inner.end(), static_cast<int64_t>(outer.size()));

  const at::Tensor normal = input.to(compute) * rstd;
  const at::Tensor grads = grad.to(compute);
  RmsNormResults results;
  if (mask[0]) {
    const at::Tensor scaled = weighted ? grads * weight->to(compute) : grads;
    std::get<0>(results) = ((scaled - normal * (scaled * normal).mean(inner, true)) * rstd).to(input.scalar_type());
  }
  if (mask[1] && weighted) {
    const at::Tensor products = grads * normal;
    std::get<1>(results) = (outer.empty() ? products : products.sum(outer)).to(weight->scalar_type());
  }
  return results;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_rms_norm", &fused_rms_norm);
  m.impl("_fused_rms_norm_backward", &fused_rms_norm_backward);
}

} // namespace
} // namespace backplane
