// Layers of recurrent networks on the CPU: an LSTM's of float32 by oneDNN, as PyTorch's, others by steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "aten/rnn_directions.h"

namespace backplane {

// Whether oneDNN computes the layer. It saves a workspace whose size is not known before.
bool is_onednn(const Given& given);

// Fills the results. What oneDNN saves replaces `saved`.
void layer_on_cpu(const Given& given, RnnResults& results, bool training);

// The gradients of input, hx, cx and the parameters; where there is no cx, of nothing.
std::vector<at::Tensor> gradients_on_cpu(Computed computed);

} // namespace backplane
