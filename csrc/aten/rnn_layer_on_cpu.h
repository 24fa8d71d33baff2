// Layers of recurrent networks on the CPU, for its tensors and for devices that share memory with it: an LSTM's of float32 by
// oneDNN, others by steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "aten/rnn_directions.h"

namespace backplane {

// How many bytes an LSTM of float32 saves of a direction, at most.
int64_t most_bytes(const Given& given);

// Fills the results.
void layer_on_cpu(const Given& given, const Results& results, bool training);

// Fills the gradients: of input, hx, cx and the parameters; where there is none of one it is left out.
void gradients_on_cpu(const Computed& computed, const std::vector<at::Tensor>& gradients);

} // namespace backplane
