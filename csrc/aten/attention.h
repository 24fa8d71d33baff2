// How devices that run kernels compute attention (torch_backplane/operators/attention.py).
#pragma once

#include <c10/core/Device.h>

namespace backplane {

enum class AttentionWay {
  Composed, // of products and a softmax
  OnePass, // by kernels
  Host, // by the CPU's kernel, in stream order; composed where the host does not see the device's memory
};

void set_attention(c10::DeviceIndex device, AttentionWay way);

} // namespace backplane
