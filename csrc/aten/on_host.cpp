// Operators of the CPU's whose results go where arguments say, for planners that have the host compute on the device's memory
// (torch_backplane.planning.host): PyTorch has them without `out=` only, or with results that are always wanted.
#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution_backward.h>
#include <torch/library.h>

#include <array>

namespace backplane {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The gradients that there is a tensor for.
void convolution_backward(
    const Tensor& grad,
    const Tensor& input,
    const Tensor& weight,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    const OptionalTensor& of_input,
    const OptionalTensor& of_weight,
    const OptionalTensor& of_bias) {
  const auto [input_grad, weight_grad, bias_grad] = at::convolution_backward(
      grad, input, weight, grad.sizes().slice(1, 1), stride, padding, dilation, transposed, output_padding, groups,
      {of_input.has_value(), of_weight.has_value(), of_bias.has_value()});
  for (const auto& [out, result] : {std::pair{&of_input, &input_grad}, {&of_weight, &weight_grad}, {&of_bias, &bias_grad}}) {
    if (out->has_value()) {
      (*out)->copy_(*result);
    }
  }
}

TORCH_LIBRARY_FRAGMENT(backplane, m) {
  m.def(
      "convolution_backward(Tensor grad, Tensor input, Tensor weight, int[] stride, int[] padding, int[] dilation, "
      "bool transposed, int[] output_padding, int groups, *, Tensor(a!)? of_input, Tensor(b!)? of_weight, "
      "Tensor(c!)? of_bias) -> ()");
}

TORCH_LIBRARY_IMPL(backplane, CPU, m) {
  m.impl("convolution_backward", &convolution_backward);
}

} // namespace
} // namespace backplane
