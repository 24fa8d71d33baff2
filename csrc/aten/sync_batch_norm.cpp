// The parts of torch.nn.SyncBatchNorm, which exchanges statistics between ranks. PyTorch has no CPU kernels of them.
// Statistics have the compute dtype, which is float32 for 16-bit inputs.
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/var_mean.h>
#include <torch/library.h>

#include <vector>

namespace backplane {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

bool is_given(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

at::Tensor widened(const at::Tensor& tensor) {
  return tensor.to(at::toOpMathType(tensor.scalar_type()));
}

void check_is_batch(const at::Tensor& batch) {
  TORCH_CHECK_VALUE(batch.dim() >= 2, "expected at least 2D input (got ", batch.dim(), "D input)");
}

// All dimensions of a batch except the channels.
std::vector<int64_t> reduced_dimensions(const at::Tensor& batch) {
  check_is_batch(batch);
  std::vector<int64_t> dimensions{0};
  for (int64_t i = 2; i < batch.dim(); ++i) {
    dimensions.push_back(i);
  }
  return dimensions;
}

// A number per channel, as a tensor that broadcasts to the batch.
at::Tensor per_channel(const at::Tensor& values, const at::Tensor& batch) {
  check_is_batch(batch);
  std::vector<int64_t> sizes(batch.dim(), 1);
  sizes[1] = values.numel();
  return widened(values).reshape(sizes);
}

std::tuple<at::Tensor, at::Tensor> batch_norm_stats(const at::Tensor& input, double eps) {
  const auto [variance, mean] = at::var_mean(widened(input), reduced_dimensions(input), /*correction=*/0);
  return {mean, (variance + eps).rsqrt()};
}

// `mean`, `invstd`: rank × channel. `counts`: the elements per channel of each rank.
std::tuple<at::Tensor, at::Tensor> batch_norm_gather_stats_with_counts(
    const at::Tensor& input,
    const at::Tensor& mean,
    const at::Tensor& invstd,
    const OptionalTensor& running_mean,
    const OptionalTensor& running_var,
    double momentum,
    double eps,
    const at::Tensor& counts) {
  const at::Tensor means = widened(mean);
  const at::Tensor weights = counts.to(means.scalar_type()).unsqueeze(1);
  const at::Tensor total = weights.sum();
  const at::Tensor all_mean = (means * weights).sum(0) / total;
  const at::Tensor variances = widened(invstd).pow(-2) - eps;
  const at::Tensor squares = ((variances + (means - all_mean).square()) * weights).sum(0);
  if (is_given(running_mean)) {
    running_mean->mul_(1 - momentum).add_(all_mean, momentum);
  }
  if (is_given(running_var)) {
    running_var->mul_(1 - momentum).add_(squares / (total - 1), momentum);
  }
  return {all_mean, (squares / total + eps).rsqrt()};
}

at::Tensor batch_norm_elemt(
    const at::Tensor& input,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    const at::Tensor& mean,
    const at::Tensor& invstd,
    double eps) {
  at::Tensor result = (widened(input) - per_channel(mean, input)) * per_channel(invstd, input);
  if (is_given(weight)) {
    result = result * per_channel(*weight, input);
  }
  if (is_given(bias)) {
    result = result + per_channel(*bias, input);
  }
  return result.to(input.scalar_type());
}

// Returns, per channel: the sums of the gradients, and of gradients times centred inputs; the gradients of weight,
// bias.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm_backward_reduce(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& mean,
    const at::Tensor& invstd,
    const OptionalTensor& weight,
    bool needs_input,
    bool needs_weight,
    bool needs_bias) {
  const auto dimensions = reduced_dimensions(input);
  const at::Tensor grads = widened(grad);
  const at::Tensor sums = grads.sum(dimensions);
  const at::Tensor products = (grads * (widened(input) - per_channel(mean, input))).sum(dimensions);
  const auto dtype = is_given(weight) ? weight->scalar_type() : input.scalar_type();
  return {
      needs_input ? sums : at::Tensor(), needs_input ? products : at::Tensor(),
      needs_weight ? (products * widened(invstd)).to(dtype) : at::Tensor(), needs_bias ? sums.to(dtype) : at::Tensor()};
}

// `sum_dy`, `sum_dy_xmu`: the sums of batch_norm_backward_reduce over all ranks.
at::Tensor batch_norm_backward_elemt(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& mean,
    const at::Tensor& invstd,
    const OptionalTensor& weight,
    const at::Tensor& sum_dy,
    const at::Tensor& sum_dy_xmu,
    const at::Tensor& count) {
  const at::Tensor total = count.sum();
  const at::Tensor centred = widened(input) - per_channel(mean, input);
  const at::Tensor slope = per_channel(widened(invstd).square() * sum_dy_xmu / total, input);
  at::Tensor scale = per_channel(invstd, input);
  if (is_given(weight)) {
    scale = scale * per_channel(*weight, input);
  }
  return ((widened(grad) - per_channel(sum_dy / total, input) - centred * slope) * scale).to(input.scalar_type());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("batch_norm_stats", &batch_norm_stats);
  m.impl("batch_norm_gather_stats_with_counts", &batch_norm_gather_stats_with_counts);
  m.impl("batch_norm_elemt", &batch_norm_elemt);
  m.impl("batch_norm_backward_reduce", &batch_norm_backward_reduce);
  m.impl("batch_norm_backward_elemt", &batch_norm_backward_elemt);
}

} // namespace
} // namespace backplane
