// Pinned host memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

namespace backplane {

at::HostAllocator& pinned_allocator();

// True for every address inside memory that the pinned allocator has handed out or keeps cached.
bool is_pinned(const void* address);

} // namespace backplane
