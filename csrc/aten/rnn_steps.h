// Steps of recurrent layers, on the CPU's tensors and on bp's: the operators of rnn_steps.cpp, which says what is what.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace backplane {

// (batch, hidden) each, but gates and what is saved.
void lstm_step(
    const at::Tensor& out,
    const at::Tensor& new_cell,
    const at::Tensor& saved, // (batch, 4 * hidden)
    const at::Tensor& input_gates,
    const at::Tensor& hidden_gates,
    const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias,
    const at::Tensor& cell);
// `later` is what the next step adds to the gradient of the result.
void lstm_step_backward(
    const at::Tensor& of_gates,
    const at::Tensor& of_cell,
    const at::Tensor& grad,
    const std::optional<at::Tensor>& later,
    const std::optional<at::Tensor>& cell_grad,
    const at::Tensor& cell,
    const at::Tensor& new_cell,
    const at::Tensor& saved);

void gru_step(
    const at::Tensor& out,
    const at::Tensor& saved, // (batch, 4 * hidden)
    const at::Tensor& input_gates,
    const at::Tensor& hidden_gates,
    const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias,
    const at::Tensor& hidden);
// `of_hidden` is what does not go through the hidden side's gates.
void gru_step_backward(
    const at::Tensor& of_gates,
    const at::Tensor& of_hidden_gates,
    const at::Tensor& of_hidden,
    const at::Tensor& grad,
    const std::optional<at::Tensor>& later,
    const at::Tensor& hidden,
    const at::Tensor& saved);

void rnn_step(
    const at::Tensor& out,
    const at::Tensor& input_gates,
    const at::Tensor& hidden_gates,
    const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias,
    bool relu);
void rnn_step_backward(
    const at::Tensor& of_gates,
    const at::Tensor& grad,
    const std::optional<at::Tensor>& later,
    const at::Tensor& out,
    bool relu);

} // namespace backplane
