#include "aten/rnn_layer_on_cpu.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/mkldnn_rnn_layer_backward.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>


namespace backplane {

using at::Tensor;

namespace {

bool is_onednn(const Tensor& input, int64_t mode) {
  return mode == kLstm && input.scalar_type() == at::kFloat && at::globalContext().userEnabledMkldnn() &&
      at::Context::hasMKLDNN();
}

// What is saved for gradients

// An LSTM of float32 saves bytes: a header, then oneDNN's workspace or what steps save. Plans set memory aside before
// anybody knows how much oneDNN wants (operators/rnn.py has a bound); where that is too little, steps compute.
enum SavedBy : uint8_t { kSteps, kOnednn };
struct Header {
  SavedBy by;
};

Header& header_of(const Tensor& saved) {
  return *reinterpret_cast<Header*>(saved.data_ptr<uint8_t>());
}

Tensor behind_header(const Tensor& saved) {
  return saved.narrow(0, kHeader, saved.numel() - kHeader);
}

bool is_bytes(const Tensor& saved) {
  return saved.scalar_type() == at::kByte;
}

// As numbers, what steps save.
Tensor saved_of_steps(const Tensor& saved, const Direction& given) {
  if (!is_bytes(saved)) {
    return saved;
  }
  const int64_t columns = kept_of(given.mode) * given.hidden();
  return behind_header(saved)
      .narrow(0, 0, given.time() * given.batch() * columns * given.input.element_size())
      .view(given.input.scalar_type())
      .view({given.time(), given.batch(), columns});
}

// A direction

// What oneDNN's layers are given: contiguous, as they look at no strides, states of one layer, and biases in any case.
Tensor of_one_layer(const Tensor& state) {
  return state.contiguous().unsqueeze(0);
}
Tensor bias_or_zeros(const OptionalTensor& bias, const Tensor& weight) {
  return bias.has_value() ? bias->contiguous() : at::zeros({weight.size(0)}, weight.options());
}

// With what it saves for gradients, of the size that it says.
Results layer_by_onednn(const Direction& given, bool training) {
  // It saves what gradients need where they are enabled, which they are not below autograd.
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
      computed.grad.contiguous(), of_one_layer(computed.grad_hy), of_one_layer(computed.grad_cy), given.reverse, given.mode,
      given.hidden(), /*num_layers=*/1, given.has_biases(), /*train=*/true, /*bidirectional=*/false, /*batch_sizes=*/{},
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

void direction_on_cpu(const Direction& given, const Results& results, bool training) {
  const bool in_bytes = training && is_bytes(results.saved);
  if (is_onednn(given.input, given.mode) && (in_bytes || !training)) {
    const Results found = layer_by_onednn(given, training);
    const int64_t bytes = found.saved.numel();
    if (!in_bytes || kHeader + bytes <= results.saved.numel()) {
      results.out.copy_(found.out);
      results.hy.copy_(found.hy);
      results.cy.copy_(found.cy);
      if (in_bytes) {
        header_of(results.saved).by = kOnednn;
        behind_header(results.saved).narrow(0, 0, bytes).copy_(found.saved.view({bytes}));
      }
      return;
    }
  }
  if (in_bytes) {
    header_of(results.saved).by = kSteps;
  }
  layer_by_steps(given, {results.out, results.hy, results.cy, saved_of_steps(results.saved, given)}, training);
}

Gradients gradients_on_cpu(const ComputedDirection& computed) {
  const Tensor& saved = computed.results.saved;
  return is_bytes(saved) && header_of(saved).by == kOnednn
      ? gradients_by_onednn(computed, behind_header(saved))
      : gradients_by_steps(computed, saved_of_steps(saved, computed.given));
}

} // namespace

// operators/rnn.py has the same, and how it was found.
int64_t most_bytes(const Given& given) {
  const auto row = [](int64_t size) { return (size + 15) / 16 * 16 + 16; };
  const int64_t hidden = given.hidden();
  return 4 * given.batch() * (given.time() + 1) * (8 * row(hidden) + 7 * row(std::max(given.input.size(2), hidden))) +
      65536 + kHeader;
}

void layer_on_cpu(const Given& given, const Results& results, bool training) {
  for (int64_t i = 0; i < given.directions(); ++i) {
    direction_on_cpu(given.direction(i), results.direction(i), training);
  }
}

void gradients_on_cpu(const Computed& computed, const std::vector<Tensor>& gradients) {
  const Given& given = computed.given;
  for (int64_t i = 0; i < given.directions(); ++i) {
    const Gradients found = gradients_on_cpu(direction_of(computed, i));
    i == 0 ? gradients[0].copy_(found.input) : gradients[0].add_(found.input);
    part(gradients[1], i).copy_(found.hx);
    if (given.cx.has_value()) {
      part(gradients[2], i).copy_(found.cx);
    }
    const Tensor* const params[] = {&found.w_ih, &found.w_hh, &found.b_ih, &found.b_hh};
    for (size_t j = 0; j < given.params_of_one(); ++j) {
      gradients[3 + i * given.params_of_one() + j].copy_(*params[j]);
    }
  }
}

} // namespace backplane
