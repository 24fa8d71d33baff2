// One layer of an LSTM, GRU or RNN, in one direction or both, and its gradients: by steps, by a whole call of the host's (an
// LSTM's by oneDNN), at once or in stream order. As operators, `backplane::rnn_layer` and `backplane::rnn_layer_backward`, which planners
// also have (torch_backplane/operators/rnn.py).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace backplane {

// Whether no planner is asked for a layer, declared or not: it is composed of steps here, or a host device's later call.
bool asks_no_planner(const at::Tensor& tensor);

// The operators on bp, without planners.
void layer_of_bp(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void gradients_of_bp(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace backplane
