// A wrapper that hides the host-accessible memory of a device.
//
// Tensors get synthetic addresses, which the CPU cannot access, and the wrapper translates them to the real ones. This
// makes it possible to test support for discrete accelerators on any machine (TORCH_BACKPLANE_DISCRETE=1).
#pragma once

#include <memory>

#include "devices/device.h"

namespace backplane {

// `inner` must have host-accessible memory.
std::unique_ptr<Device> make_discrete(std::unique_ptr<Device> inner);

} // namespace backplane
