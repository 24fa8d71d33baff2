#include "aten/rnn_layer_on_cpu.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/mkldnn_rnn_layer_backward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

namespace backplane {

using at::Tensor;

namespace {

// Arguments for oneDNN's layers, which ignore strides, take states with a layer dimension, and always need biases.
Tensor of_one_layer(const Tensor& state) {
  return state.contiguous().unsqueeze(0);
}
Tensor bias_or_zeros(const OptionalTensor& bias, const Tensor& weight) {
  return bias.has_value() ? bias->contiguous() : at::zeros({weight.size(0)}, weight.options());
}

// `saved` of the results is oneDNN's workspace, whose size oneDNN chooses.
RnnResults layer_by_onednn(const Direction& given, bool training) {
  // It fills the workspace only if gradients are enabled, and they are disabled below autograd.
  const at::AutoGradMode saves(training);
  auto [out, hy, cy, workspace] = at::mkldnn_rnn_layer(
      given.input.contiguous(), given.w_ih.contiguous(), given.w_hh.contiguous(), bias_or_zeros(given.b_ih, given.w_ih),
      bias_or_zeros(given.b_hh, given.w_hh), of_one_layer(given.hx), of_one_layer(*given.cx), given.reverse,
      /*batch_sizes=*/{}, given.mode, given.hidden(), /*num_layers=*/1, given.has_biases(), /*bidirectional=*/false,
      /*batch_first=*/false, training);
  return {out, hy.squeeze(0), cy.squeeze(0), workspace};
}

Gradients gradients_by_onednn(const ComputedDirection& computed, const Tensor& workspace) {
  const Direction& given = computed.given;
  auto [of_input, of_w_ih, of_w_hh, of_b_ih, of_b_hh, of_hx, of_cx] = at::mkldnn_rnn_layer_backward(
      given.input.contiguous(), given.w_ih.contiguous(), given.w_hh.contiguous(), bias_or_zeros(given.b_ih, given.w_ih),
      bias_or_zeros(given.b_hh, given.w_hh), of_one_layer(given.hx), of_one_layer(*given.cx),
      computed.results.out.contiguous(), of_one_layer(computed.results.hy), of_one_layer(computed.results.cy),
      computed.grad.contiguous(), of_one_layer(computed.grad_hy), of_one_layer(computed.grad_cy), given.reverse,
      given.mode, given.hidden(), /*num_layers=*/1, given.has_biases(), /*train=*/true, /*bidirectional=*/false,
      /*batch_sizes=*/{},
      /*batch_first=*/false, workspace);
  return {
      of_input,
      of_hx.view(given.hx.sizes()),
      of_cx.view(given.hx.sizes()),
      of_w_ih,
      of_w_hh,
      given.has_biases() ? of_b_ih : nothing(given.input),
      given.has_biases() ? of_b_hh : nothing(given.input)};
}

} // namespace

bool is_onednn(const LayerArguments& given) {
  return given.mode == kLstm && given.input.scalar_type() == at::kFloat && at::globalContext().userEnabledMkldnn() &&
      at::Context::hasMKLDNN();
}

void layer_on_cpu(const LayerArguments& given, RnnResults& results, bool training) {
  std::vector<Tensor> workspaces;
  for (int64_t i = 0; i < given.directions(); ++i) {
    const RnnResults places = results.direction(i);
    if (!is_onednn(given)) {
      layer_by_steps(given.direction(i), places, training);
      continue;
    }
    const RnnResults found = layer_by_onednn(given.direction(i), training);
    places.out.copy_(found.out);
    places.hy.copy_(found.hy);
    places.cy.copy_(found.cy);
    workspaces.push_back(found.saved);
  }
  if (training && !workspaces.empty()) {
    results.saved = at::stack(workspaces);
  }
}

std::vector<Tensor> gradients_on_cpu(Computed computed) {
  const LayerArguments& given = computed.given;
  if (saves_nothing(computed)) {
    computed.results = new_results(given, /*training=*/!is_onednn(given));
    layer_on_cpu(given, computed.results, /*training=*/true);
  }
  return gradients(computed, [](const ComputedDirection& one) {
    const Tensor& saved = one.results.saved;
    return saved.scalar_type() == at::kByte ? gradients_by_onednn(one, saved) : gradients_by_steps(one, saved);
  });
}

} // namespace backplane
