// Devices in host memory: each has a memory limit of its own and real, in-order streams.
#pragma once

#include <memory>

#include "devices/device.h"

namespace backplane {

// `memory_limit` in bytes; allocations beyond it fail as they would on a card of that size.
std::unique_ptr<Device> make_host_device(DeviceProperties properties, size_t memory_limit);

} // namespace backplane
