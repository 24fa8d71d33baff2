// RMS norm in one launch, and its backward in two, on devices that run kernels. PyTorch composes the forward of other
// operators where a device has no kernel of it, and has no CPU kernel of the backward.
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_rms_norm_compositeimplicitautograd_dispatch.h>
#include <torch/library.h>

#include <numeric>

#include "device.h"

namespace backplane {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using Results = std::tuple<at::Tensor, at::Tensor>;

// What the planners (torch_backplane/operators/norms.py) serve.
bool has_planner(const at::Tensor& input, const OptionalTensor& weight) {
  const bool same = !weight || !weight->defined() || weight->scalar_type() == input.scalar_type();
  const at::ScalarType type = input.scalar_type();
  const bool real = type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
  return real && same && !device(input.device().index()).properties().dialect.empty();
}

// Returns the result, and one over the root of the mean square, in float32 for numbers of 16 bits.
Results fused_rms_norm(const at::Tensor& input, at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                       std::optional<double> eps) {
  if (!has_planner(input, weight)) {
    return at::compositeimplicitautograd::_fused_rms_norm(input, normalized_shape, weight, eps);
  }
  static const auto planned = c10::Dispatcher::singleton()
                                  .findSchemaOrThrow("backplane::rms_norm", "")
                                  .typed<decltype(fused_rms_norm)>();
  return planned.call(input, normalized_shape, weight, eps);
}

Results fused_rms_norm_backward(const at::Tensor& grad, const at::Tensor& input, at::IntArrayRef normalized_shape,
                                const at::Tensor& rstd, const OptionalTensor& weight, std::array<bool, 2> mask) {
  if (has_planner(input, weight)) {
    static const auto planned = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("backplane::rms_norm_backward", "")
                                    .typed<decltype(fused_rms_norm_backward)>();
    return planned.call(grad, input, normalized_shape, rstd, weight, mask);
  }
  const bool weighted = weight && weight->defined();
  const auto compute = at::toOpMathType(input.scalar_type());
  std::vector<int64_t> outer(input.dim() - normalized_shape.size()), inner(normalized_shape.size());
  std::iota(outer.begin(), outer.end(), 0);
  std::iota(inner.begin(), inner.end(), static_cast<int64_t>(outer.size()));

  const at::Tensor normal = input.to(compute) * rstd;
  const at::Tensor grads = grad.to(compute);
  Results results;
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

TORCH_LIBRARY_FRAGMENT(backplane, m) {
  m.def("rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight, "
      "bool[2] output_mask) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_rms_norm", &fused_rms_norm);
  m.impl("_fused_rms_norm_backward", &fused_rms_norm_backward);
}

} // namespace
} // namespace backplane
