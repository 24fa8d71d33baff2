// A device with host-accessible memory in the clothes of one without.
//
// Tensors get addresses that the CPU cannot touch, and the device's own calls translate them to where the memory is. With
// it (TORCH_BACKPLANE_DISCRETE=1) everything that a discrete accelerator needs can be tested on any machine.
#pragma once

#include <memory>

#include "devices/device.h"

namespace backplane {

// `inner` must have host-accessible memory.
std::unique_ptr<Device> make_discrete(std::unique_ptr<Device> inner);

} // namespace backplane
