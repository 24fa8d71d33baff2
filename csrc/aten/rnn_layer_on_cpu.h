// Recurrent layers on the CPU: float32 LSTMs with oneDNN, like PyTorch, and others by steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "aten/rnn_directions.h"

namespace backplane {

// Whether oneDNN computes the layer. The size of its workspace is not known in advance.
bool is_onednn(const LayerArguments& given);

// Fills the results. With oneDNN, replaces results.saved by the workspace.
void layer_on_cpu(const LayerArguments& given, RnnResults& results, bool training);

// The gradients of input, hx, cx (an empty tensor without cx) and the parameters.
std::vector<at::Tensor> gradients_on_cpu(Computed computed);

} // namespace backplane
