// One step of a recurrent layer, and its gradients. The operators write their results to arguments, so that the steps
// of a layer fill one tensor (rnn_layer.cpp). Devices that run kernels have a kernel for each
// (torch_backplane/operators/rnn.py). PyTorch's fused cells, which have no CPU kernel, are implemented with these
// operators.
//
// Gates are concatenated along the last dimension, with `hidden` elements each. LSTM: input, forget, cell, output. GRU:
// reset, update, new. Others have one gate. `saved` contains the activated gates, and for a GRU the hidden state's
// contribution to `new`. `later` is what the next step adds to the gradient of the result. A GRU's `of_hidden` is the
// part of the state's gradient that does not go through the gates.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <initializer_list>
#include <tuple>

#include "aten/rnn_steps.h"

namespace backplane {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace {

bool has(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

// sums = gates + bias
void add_to(Tensor sums, const Tensor& gates, const OptionalTensor& bias) {
  sums.copy_(gates);
  if (has(bias)) {
    sums.add_(*bias);
  }
}

Tensor total_of(const Tensor& grad, const OptionalTensor& later) {
  return has(later) ? grad + *later : grad;
}

// An argument of a step, and its columns as a multiple of the state's.
struct Matrix {
  const char* name;
  const Tensor& tensor;
  int64_t times;
};

void check_matrices(const char* step, const Tensor& state, std::initializer_list<Matrix> matrices) {
  TORCH_CHECK(state.dim() == 2, step, " expected a state of sizes (batch, hidden), but got ", state.sizes());
  for (const auto& [name, tensor, times] : matrices) {
    TORCH_CHECK(
        tensor.dim() == 2 && tensor.size(0) == state.size(0) && tensor.size(1) == times * state.size(1) &&
            tensor.scalar_type() == state.scalar_type() && tensor.device() == state.device(),
        step, " expected ", name, " of sizes [", state.size(0), ", ", times * state.size(1), "] and of ",
        state.scalar_type(), ", but got ", tensor.sizes(), " of ", tensor.scalar_type());
  }
}

void check_vectors(const char* step, const Tensor& state, int64_t times, std::initializer_list<OptionalTensor> biases) {
  for (const OptionalTensor& bias : biases) {
    TORCH_CHECK(
        !has(bias) ||
            (bias->dim() == 1 && bias->size(0) == times * state.size(1) && bias->scalar_type() == state.scalar_type() &&
             bias->device() == state.device()),
        step, " expected a bias of ", times * state.size(1), " elements and of ", state.scalar_type(),
        ", but got sizes ", bias->sizes(), " of ", bias->scalar_type());
  }
}

const Tensor& or_else(const OptionalTensor& tensor, const Tensor& other) {
  return has(tensor) ? *tensor : other;
}

void lstm_step_by_tensors(
    const Tensor& out,
    const Tensor& new_cell,
    const Tensor& saved,
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias,
    const Tensor& cell) {
  check_matrices(
      "lstm_step", cell,
      {{"out", out, 1},
       {"new_cell", new_cell, 1},
       {"saved", saved, 4},
       {"input_gates", input_gates, 4},
       {"hidden_gates", hidden_gates, 4}});
  check_vectors("lstm_step", cell, 4, {input_bias, hidden_bias});
  add_to(saved, input_gates, input_bias);
  saved.add_(hidden_gates);
  if (has(hidden_bias)) {
    saved.add_(*hidden_bias);
  }
  const int64_t hidden = cell.size(1);
  saved.narrow(1, 0, 2 * hidden).sigmoid_();
  const auto gates = saved.chunk(4, 1);
  const Tensor fresh = gates[2].tanh_(), output = gates[3].sigmoid_();
  new_cell.copy_(gates[1] * cell).addcmul_(gates[0], fresh);
  out.copy_(new_cell.tanh()).mul_(output);
}

void lstm_step_backward_by_tensors(
    const Tensor& of_gates,
    const Tensor& of_cell,
    const Tensor& grad,
    const OptionalTensor& later,
    const OptionalTensor& cell_grad,
    const Tensor& cell,
    const Tensor& new_cell,
    const Tensor& saved) {
  check_matrices(
      "lstm_step_backward", cell,
      {{"of_gates", of_gates, 4},
       {"of_cell", of_cell, 1},
       {"grad", grad, 1},
       {"later", or_else(later, grad), 1},
       {"cell_grad", or_else(cell_grad, grad), 1},
       {"new_cell", new_cell, 1},
       {"saved", saved, 4}});
  const Tensor total = total_of(grad, later);
  const auto gates = saved.chunk(4, 1);
  const Tensor &input = gates[0], &forget = gates[1], &fresh = gates[2], &output = gates[3];
  const Tensor shown = new_cell.tanh();
  Tensor inner = total * output * (1 - shown * shown);
  if (has(cell_grad)) {
    inner = inner + *cell_grad;
  }
  const auto gradients = of_gates.chunk(4, 1);
  gradients[0].copy_(inner * fresh * input * (1 - input));
  gradients[1].copy_(inner * cell * forget * (1 - forget));
  gradients[2].copy_(inner * input * (1 - fresh * fresh));
  gradients[3].copy_(total * shown * output * (1 - output));
  of_cell.copy_(inner * forget);
}

void gru_step_by_tensors(
    const Tensor& out,
    const Tensor& saved,
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias,
    const Tensor& hidden) {
  check_matrices(
      "gru_step", hidden,
      {{"out", out, 1}, {"saved", saved, 4}, {"input_gates", input_gates, 3}, {"hidden_gates", hidden_gates, 3}});
  check_vectors("gru_step", hidden, 3, {input_bias, hidden_bias});
  const int64_t size = hidden.size(1);
  const auto parts = saved.chunk(4, 1);
  const auto from = [size](const Tensor& gates, const OptionalTensor& bias, int64_t first, int64_t count) {
    const Tensor part = gates.narrow(1, first * size, count * size);
    return has(bias) ? part + bias->narrow(0, first * size, count * size) : part;
  };
  const Tensor both = saved.narrow(1, 0, 2 * size);
  both.copy_(from(input_gates, input_bias, 0, 2)).add_(from(hidden_gates, hidden_bias, 0, 2)).sigmoid_();
  parts[3].copy_(from(hidden_gates, hidden_bias, 2, 1));
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2];
  fresh.copy_(from(input_gates, input_bias, 2, 1)).addcmul_(reset, parts[3]).tanh_();
  out.copy_(hidden - fresh).mul_(update).add_(fresh);
}

void gru_step_backward_by_tensors(
    const Tensor& of_gates,
    const Tensor& of_hidden_gates,
    const Tensor& of_hidden,
    const Tensor& grad,
    const OptionalTensor& later,
    const Tensor& hidden,
    const Tensor& saved) {
  check_matrices(
      "gru_step_backward", hidden,
      {{"of_gates", of_gates, 3},
       {"of_hidden_gates", of_hidden_gates, 3},
       {"of_hidden", of_hidden, 1},
       {"grad", grad, 1},
       {"later", or_else(later, grad), 1},
       {"saved", saved, 4}});
  const Tensor total = total_of(grad, later);
  const auto parts = saved.chunk(4, 1);
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2];
  const auto gradients = of_gates.chunk(3, 1);
  const Tensor of_new = total * (1 - update) * (1 - fresh * fresh);
  gradients[0].copy_(of_new * parts[3] * reset * (1 - reset));
  gradients[1].copy_(total * (hidden - fresh) * update * (1 - update));
  gradients[2].copy_(of_new);
  of_hidden_gates.copy_(of_gates);
  of_hidden_gates.narrow(1, 2 * hidden.size(1), hidden.size(1)).mul_(reset);
  of_hidden.copy_(total * update);
}

void rnn_step_by_tensors(
    const Tensor& out,
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias,
    bool relu) {
  check_matrices("rnn_step", out, {{"input_gates", input_gates, 1}, {"hidden_gates", hidden_gates, 1}});
  check_vectors("rnn_step", out, 1, {input_bias, hidden_bias});
  add_to(out, input_gates, input_bias);
  out.add_(hidden_gates);
  if (has(hidden_bias)) {
    out.add_(*hidden_bias);
  }
  relu ? out.relu_() : out.tanh_();
}

void rnn_step_backward_by_tensors(
    const Tensor& of_gates, const Tensor& grad, const OptionalTensor& later, const Tensor& out, bool relu) {
  check_matrices(
      "rnn_step_backward", out, {{"of_gates", of_gates, 1}, {"grad", grad, 1}, {"later", or_else(later, grad), 1}});
  const Tensor total = total_of(grad, later);
  of_gates.copy_(relu ? total * (out > 0) : total * (1 - out * out));
}

void check_cell(
    const char* name,
    int64_t count,
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& state,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  check_matrices(name, state, {{"input_gates", input_gates, count}, {"hidden_gates", hidden_gates, count}});
  check_vectors(name, state, count, {input_bias, hidden_bias});
  TORCH_CHECK(has(input_bias) == has(hidden_bias), name, " expected two biases or none");
}

// PyTorch's fused cells. The layout of workspaces is private, because the backward operators get them from the forward
// operators.

// Returns hy, cy and the activated gates.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& cx,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  check_cell("_thnn_fused_lstm_cell", 4, input_gates, hidden_gates, cx, input_bias, hidden_bias);
  Tensor hy = at::empty(cx.sizes(), cx.options()), cy = at::empty(cx.sizes(), cx.options());
  Tensor workspace = at::empty(input_gates.sizes(), input_gates.options());
  lstm_step(hy, cy, workspace, input_gates, hidden_gates, input_bias, hidden_bias, cx);
  return {hy, cy, workspace};
}

// Returns the gradients of the gates before activation, of cx, and of one bias.
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
  const Tensor grad = has(grad_hy) ? *grad_hy : at::zeros_like(cy);
  Tensor of_gates = at::empty(workspace.sizes(), workspace.options()), of_cell = at::empty(cx.sizes(), cx.options());
  lstm_step_backward(of_gates, of_cell, grad, std::nullopt, grad_cy, cx, cy, workspace);
  return {of_gates, of_cell, has_bias ? of_gates.sum(0) : Tensor()};
}

// Returns hy, and a workspace for the backward: what a step saves, and hx.
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& hx,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  check_cell("_thnn_fused_gru_cell", 3, input_gates, hidden_gates, hx, input_bias, hidden_bias);
  Tensor hy = at::empty(hx.sizes(), hx.options());
  Tensor workspace = at::empty({hx.size(0), 5 * hx.size(1)}, hx.options());
  gru_step(hy, workspace.narrow(1, 0, 4 * hx.size(1)), input_gates, hidden_gates, input_bias, hidden_bias, hx);
  workspace.narrow(1, 4 * hx.size(1), hx.size(1)).copy_(hx);
  return {hy, workspace};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const int64_t hidden = grad_hy.size(1);
  Tensor of_gates = at::empty({grad_hy.size(0), 3 * hidden}, grad_hy.options());
  Tensor of_hidden_gates = at::empty_like(of_gates), of_hidden = at::empty(grad_hy.sizes(), grad_hy.options());
  gru_step_backward(
      of_gates, of_hidden_gates, of_hidden, grad_hy, std::nullopt, workspace.narrow(1, 4 * hidden, hidden),
      workspace.narrow(1, 0, 4 * hidden));
  return {
      of_gates, of_hidden_gates, of_hidden, has_bias ? of_gates.sum(0) : Tensor(),
      has_bias ? of_hidden_gates.sum(0) : Tensor()};
}

TORCH_LIBRARY_FRAGMENT(backplane, m) {
  m.def(
      "lstm_step(Tensor(a!) out, Tensor(b!) new_cell, Tensor(c!) saved, Tensor input_gates, Tensor hidden_gates, "
      "Tensor? input_bias, Tensor? hidden_bias, Tensor cell) -> ()");
  m.def(
      "lstm_step_backward(Tensor(a!) of_gates, Tensor(b!) of_cell, Tensor grad, Tensor? later, Tensor? cell_grad, "
      "Tensor cell, Tensor new_cell, Tensor saved) -> ()");
  m.def(
      "gru_step(Tensor(a!) out, Tensor(b!) saved, Tensor input_gates, Tensor hidden_gates, Tensor? input_bias, "
      "Tensor? hidden_bias, Tensor hidden) -> ()");
  m.def(
      "gru_step_backward(Tensor(a!) of_gates, Tensor(b!) of_hidden_gates, Tensor(c!) of_hidden, Tensor grad, "
      "Tensor? later, Tensor hidden, Tensor saved) -> ()");
  m.def(
      "rnn_step(Tensor(a!) out, Tensor input_gates, Tensor hidden_gates, Tensor? input_bias, Tensor? hidden_bias, "
      "bool relu) -> ()");
  m.def("rnn_step_backward(Tensor(a!) of_gates, Tensor grad, Tensor? later, Tensor out, bool relu) -> ()");
}

void register_steps(torch::Library& m) {
  m.impl("lstm_step", &lstm_step_by_tensors);
  m.impl("lstm_step_backward", &lstm_step_backward_by_tensors);
  m.impl("gru_step", &gru_step_by_tensors);
  m.impl("gru_step_backward", &gru_step_backward_by_tensors);
  m.impl("rnn_step", &rnn_step_by_tensors);
  m.impl("rnn_step_backward", &rnn_step_backward_by_tensors);
}

TORCH_LIBRARY_IMPL(backplane, CPU, m) {
  register_steps(m);
}

TORCH_LIBRARY_IMPL(backplane, PrivateUse1, m) {
  register_steps(m);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

} // namespace
} // namespace backplane
