// CPU operators that write their results to arguments, for host callbacks of planners (torch_backplane.planning.host).
// PyTorch has these operators only without out=, or with an out= variant that always needs all results.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/convolution_backward.h>
#include <torch/library.h>

#include <utility>

namespace backplane {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Computes only the gradients that have a tensor. PyTorch's out= variant needs tensors for all three.
void convolution_backward_out(
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
  for (const auto& [out, found] :
       {std::pair(&of_input, &input_grad), std::pair(&of_weight, &weight_grad), std::pair(&of_bias, &bias_grad)}) {
    if (out->has_value()) {
      (*out)->copy_(*found);
    }
  }
}

// The arguments are those of backplane::attention (attention.cpp), without dropout. PyTorch's kernels return results
// with heads next to columns in memory, which `out` seldom has, so the results are copied.
void attention_out(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const OptionalTensor& bias,
    bool is_causal,
    double scale,
    const Tensor& out,
    const Tensor& logarithm) {
  const auto [result, logarithms] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, /*dropout_p=*/0, is_causal, bias, scale);
  out.copy_(result);
  logarithm.copy_(logarithms);
}

void attention_backward_out(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const OptionalTensor& bias,
    const Tensor& out,
    const Tensor& logarithm,
    bool is_causal,
    double scale,
    const Tensor& of_query,
    const Tensor& of_key,
    const Tensor& of_value) {
  const auto [query_grad, key_grad, value_grad] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, out, logarithm, /*dropout_p=*/0, is_causal, bias, scale);
  of_query.copy_(query_grad);
  of_key.copy_(key_grad);
  of_value.copy_(value_grad);
}

TORCH_LIBRARY_FRAGMENT(backplane, m) {
  m.def(
      "host_attention(Tensor query, Tensor key, Tensor value, Tensor? bias, bool is_causal, float scale, *, "
      "Tensor(a!) out, Tensor(b!) logarithm) -> ()");
  m.def(
      "host_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor out, "
      "Tensor logarithm, bool is_causal, float scale, *, Tensor(a!) of_query, Tensor(b!) of_key, "
      "Tensor(c!) of_value) -> ()");
  m.def(
      "host_convolution_backward(Tensor grad, Tensor input, Tensor weight, int[] stride, int[] padding, int[] "
      "dilation, "
      "bool transposed, int[] output_padding, int groups, *, Tensor(a!)? of_input, Tensor(b!)? of_weight, "
      "Tensor(c!)? of_bias) -> ()");
}

TORCH_LIBRARY_IMPL(backplane, CPU, m) {
  m.impl("host_convolution_backward", &convolution_backward_out);
  m.impl("host_attention", &attention_out);
  m.impl("host_attention_backward", &attention_backward_out);
}

} // namespace
} // namespace backplane
