// Pinned host memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include "devices/device.h"

namespace backplane {

at::HostAllocator& pinned_allocator();

// The device is used from now on: host memory that is pinned, and that will be, is pinned for it. Does nothing when it is
// called again, and where the device pins none.
void pin_for(Device& device);

// True for every address inside memory that the pinned allocator has handed out or keeps cached.
bool is_pinned(const void* address);

} // namespace backplane
