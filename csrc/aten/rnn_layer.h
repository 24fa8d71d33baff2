// One layer of an LSTM, GRU or RNN, in one or both directions, and its gradients: the operators backplane::rnn_layer
// and backplane::rnn_layer_backward. A layer is computed by steps, or by one call on the host (an LSTM with oneDNN),
// immediately or in stream order. The operators also have planners (torch_backplane/operators/rnn.py).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace backplane {

// Whether a layer bypasses the planners: it is computed by steps here, or by a deferred call on a host device.
bool bypasses_planner(const at::Tensor& tensor);

// The operators on bp, without planners.
void layer_of_bp(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void gradients_of_bp(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace backplane
