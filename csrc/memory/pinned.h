// Pinned host memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include "devices/device.h"

namespace backplane {

at::HostAllocator& pinned_allocator();

// Called when the device is first used. Pins all current and future pinned memory for it. Does nothing if called again,
// or if the device cannot pin memory.
void pin_for(Device& device);

// True for every address inside memory that the pinned allocator has allocated or keeps cached.
bool is_pinned(const void* address);

} // namespace backplane
