// Cells of LSTM and GRU. PyTorch sends these to the device fused, under names that have no CPU kernel; here they are
// spelled out. Workspace layouts are ours: whoever calls the backward operators got the workspace from the forward ones.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <tuple>

namespace backplane {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool has(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return has(bias) ? gates + *bias : gates;
}

// input_gates, hidden_gates: (batch, 4 * hidden), in the order input, forget, cell, output; cx: (batch, hidden).
// Returns hy, cy and the four activated gates.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& cx,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const Tensor input = gates[0].sigmoid();
  const Tensor forget = gates[1].sigmoid();
  const Tensor cell = gates[2].tanh();
  const Tensor output = gates[3].sigmoid();
  const Tensor cy = forget * cx + input * cell;
  return {output * cy.tanh(), cy, at::cat({input, forget, cell, output}, 1)};
}

// Returns the gradients of the gates before activation (batch, 4 * hidden), of cx, and of one bias.
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy,
    const OptionalTensor& grad_cy,
    const Tensor& cx,
    const Tensor& cy,
    const Tensor& workspace,
    bool has_bias) {
  if (!has(grad_hy) && !has(grad_cy)) {
    return {};
  }
  const auto gates = workspace.chunk(4, 1);
  const Tensor &input = gates[0], &forget = gates[1], &cell = gates[2], &output = gates[3];
  const Tensor tanh_cy = cy.tanh();
  Tensor grad_cell_state = has(grad_cy) ? *grad_cy : at::zeros_like(cy);
  Tensor grad_output = at::zeros_like(cy);
  if (has(grad_hy)) {
    grad_output = *grad_hy * tanh_cy * output * (1 - output);
    grad_cell_state = grad_cell_state + *grad_hy * output * (1 - tanh_cy * tanh_cy);
  }
  const Tensor grad_gates = at::cat(
      {grad_cell_state * cell * input * (1 - input),
       grad_cell_state * cx * forget * (1 - forget),
       grad_cell_state * input * (1 - cell * cell),
       grad_output},
      1);
  return {grad_gates, grad_cell_state * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

// input_gates, hidden_gates: (batch, 3 * hidden), in the order reset, update, new; hx: (batch, hidden).
// Returns hy, and what the backward needs: reset, update, new, hx, and the hidden side's share of new.
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& hx,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
  const Tensor update = (from_input[1] + from_hidden[1]).sigmoid();
  const Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const Tensor &reset = saved[0], &update = saved[1], &fresh = saved[2], &hx = saved[3], &hidden_new = saved[4];
  const Tensor grad_update = grad_hy * (hx - fresh) * update * (1 - update);
  const Tensor grad_new = grad_hy * (1 - update) * (1 - fresh * fresh);
  const Tensor grad_reset = grad_new * hidden_new * reset * (1 - reset);
  const Tensor grad_input = at::cat({grad_reset, grad_update, grad_new}, 1);
  const Tensor grad_hidden = at::cat({grad_reset, grad_update, grad_new * reset}, 1);
  return {
      grad_input,
      grad_hidden,
      grad_hy * update,
      has_bias ? grad_input.sum(0) : Tensor(),
      has_bias ? grad_hidden.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

} // namespace
} // namespace backplane
