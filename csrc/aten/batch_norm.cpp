// Batch norm of empty inputs on devices without float64. PyTorch would create the statistics in the dtype in which its
// CPU kernels accumulate, which is float64 for float32.
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_batch_norm_impl_index_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "devices/device.h"

namespace backplane {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using BatchNormResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t>;

BatchNormResults batch_norm_impl_index(
    const at::Tensor& input,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    const OptionalTensor& running_mean,
    const OptionalTensor& running_var,
    bool training,
    double momentum,
    double eps,
    bool cudnn_enabled) {
  if (input.sym_numel() != 0 || device(input.device().index()).properties().supports(at::kDouble)) {
    return at::compositeimplicitautograd::_batch_norm_impl_index(
        input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled);
  }
  const auto none = [&](int64_t size, at::ScalarType dtype) { return at::empty({size}, input.options().dtype(dtype)); };
  const at::ScalarType compute = at::toOpMathType(input.scalar_type());
  at::Tensor out = input.clone();
  if (weight && weight->defined()) {
    out = out * (*weight)[0];
  }
  if (bias && bias->defined()) {
    out = out + (*bias)[0];
  }
  return {out, none(input.size(1), compute), none(input.size(1), compute), none(0, at::kByte), 0};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_batch_norm_impl_index", &batch_norm_impl_index);
}

// Needs no autograd formula, because it only calls differentiable functions.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_batch_norm_impl_index", &batch_norm_impl_index);
}

} // namespace
} // namespace backplane
