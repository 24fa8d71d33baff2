// Convolutions on the CPU: by Winograd's way where that pays, or else PyTorch's. For planners that have the host compute on the
// device's memory, results go where arguments say; for host devices there are the same that return them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <array>
#include <vector>

#include "aten/places.h"
#include "aten/winograd.h"

namespace backplane {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using winograd::Direction;

// Whether Winograd's way computes what goes to `out`: where it can, if it is asked for, or else where it pays. `results` are
// those of the convolution, or their gradients.
bool is_winograds(
    Direction direction,
    const std::optional<bool>& asked,
    const Tensor& input,
    const Tensor& weight,
    const Tensor& results,
    const winograd::Settings& settings,
    const OptionalTensor& out) {
  const auto fits = [](const Tensor& one, at::IntArrayRef sizes) {
    return one.scalar_type() == at::kFloat && one.is_contiguous() && one.sizes() == sizes;
  };
  return out.has_value() && asked.value_or(true) && winograd::takes(input, weight, settings) &&
      fits(results, winograd::sizes_of_results(input, weight, settings.padding)) &&
      (direction == Direction::kForward ||
       fits(*out, (direction == Direction::kGradientOfInput ? input : weight).sizes())) &&
      (asked.has_value() || winograd::pays(direction, input, weight, settings.padding));
}

// The gradients that there is a tensor for.
void convolution_backward_to_places(
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
    const OptionalTensor& of_bias,
    const std::optional<bool>& by_winograd) {
  Places places{of_input, of_weight, of_bias};
  const winograd::Settings settings{stride, padding, dilation, transposed, groups};
  if (is_winograds(Direction::kGradientOfInput, by_winograd, input, weight, grad, settings, of_input) &&
      winograd::gradient_of_input(grad, weight, padding, *of_input)) {
    places[0].reset();
  }
  if (is_winograds(Direction::kGradientOfWeight, by_winograd, input, weight, grad, settings, of_weight) &&
      winograd::gradient_of_weight(grad, input, padding, *of_weight)) {
    places[1].reset();
  }
  if (!places[0].has_value() && !places[1].has_value()) {
    if (of_bias.has_value()) {
      std::vector<int64_t> dims{0};
      for (int64_t dim = 2; dim < grad.dim(); ++dim) {
        dims.push_back(dim);
      }
      Tensor sum = *of_bias;
      at::sum_out(sum, grad, dims);
    }
    return;
  }
  deliver(places, [&]() -> std::vector<Tensor> {
    const Offer offer(places);
    const auto [input_grad, weight_grad, bias_grad] = at::convolution_backward(
        grad, input, weight, grad.sizes().slice(1, 1), stride, padding, dilation, transposed, output_padding, groups,
        {places[0].has_value(), places[1].has_value(), places[2].has_value()});
    return {input_grad, weight_grad, bias_grad};
  }());
}

void convolution_to_place(
    const Tensor& input,
    const Tensor& weight,
    const OptionalTensor& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    const Tensor& out,
    const std::optional<bool>& by_winograd) {
  const winograd::Settings settings{stride, padding, dilation, transposed, groups};
  const bool has_bias = bias.has_value() && bias->defined();
  const bool fits = !has_bias || (bias->scalar_type() == at::kFloat && bias->sizes() == weight.sizes().slice(0, 1));
  if (fits && is_winograds(Direction::kForward, by_winograd, input, weight, out, settings, out) &&
      winograd::forward(input, weight, has_bias ? *bias : Tensor(), padding, out)) {
    return;
  }
  const Places places{out};
  deliver(places, [&]() -> std::vector<Tensor> {
    const Offer offer(places);
    return {at::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)};
  }());
}

// Those that return their results

Tensor convolution(
    const Tensor& input,
    const Tensor& weight,
    const OptionalTensor& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups) {
  if (!winograd::takes(input, weight, {stride, padding, dilation, transposed, groups})) {
    return at::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  }
  const Tensor out = at::empty(winograd::sizes_of_results(input, weight, padding), input.options());
  convolution_to_place(
      input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, out, /*by_winograd=*/std::nullopt);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad,
    const Tensor& input,
    const Tensor& weight,
    at::OptionalIntArrayRef bias_sizes,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> wanted) {
  if (!winograd::takes(input, weight, {stride, padding, dilation, transposed, groups})) {
    return at::convolution_backward(
        grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, wanted);
  }
  const auto place = [&](bool is_wanted, at::IntArrayRef sizes) {
    return is_wanted ? OptionalTensor(at::empty(sizes, input.options())) : std::nullopt;
  };
  const OptionalTensor of_input = place(wanted[0], input.sizes()), of_weight = place(wanted[1], weight.sizes()),
                       of_bias = place(wanted[2], weight.sizes().slice(0, 1));
  convolution_backward_to_places(
      grad, input, weight, stride, padding, dilation, transposed, output_padding, groups, of_input, of_weight, of_bias,
      /*by_winograd=*/std::nullopt);
  return {of_input.value_or(Tensor()), of_weight.value_or(Tensor()), of_bias.value_or(Tensor())};
}

TORCH_LIBRARY_FRAGMENT(backplane, m) {
  m.def(
      "host_convolution(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
      "bool transposed, int[] output_padding, int groups, *, Tensor(a!) out, bool? winograd=None) -> ()");
  m.def(
      "host_convolution_backward(Tensor grad, Tensor input, Tensor weight, int[] stride, int[] padding, int[] dilation, "
      "bool transposed, int[] output_padding, int groups, *, Tensor(a!)? of_input, Tensor(b!)? of_weight, "
      "Tensor(c!)? of_bias, bool? winograd=None) -> ()");
  m.def(
      "convolution(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, bool transposed, "
      "int[] output_padding, int groups) -> Tensor");
  m.def(
      "convolution_backward(Tensor grad, Tensor input, Tensor weight, int[]? bias_sizes, int[] stride, int[] padding, "
      "int[] dilation, bool transposed, int[] output_padding, int groups, bool[3] wanted) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(backplane, CPU, m) {
  m.impl("host_convolution", &convolution_to_place);
  m.impl("host_convolution_backward", &convolution_backward_to_places);
  m.impl("convolution", &convolution);
  m.impl("convolution_backward", &convolution_backward);
}

TORCH_LIBRARY_IMPL(backplane, Meta, m) {
  m.impl("convolution", &at::convolution);
  m.impl("convolution_backward", &at::convolution_backward);
}

} // namespace
} // namespace backplane
