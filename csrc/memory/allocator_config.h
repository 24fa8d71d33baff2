// What PYTORCH_ALLOC_CONF says about device memory, as the allocators of this process read it.
//
// PyTorch's own parser (c10::CachingAllocator::AcceleratorAllocatorConfig) owns the options that all accelerators share.
// Those that only torch.cuda's parser knows are registered here, so that one string serves both.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <string>

namespace backplane {

// A copy of PyTorch's settings that the hot path reads without a call; refreshed whenever they are set.
struct AllocatorSettings {
  std::atomic<size_t> large_segment_size;
  std::atomic<size_t> max_split_size;
  std::atomic<size_t> max_non_split_rounding_size;
  std::atomic<double> garbage_collection_threshold;
  std::atomic<bool> expandable_segments;
  std::atomic<double> per_process_memory_fraction; // of devices that are first used from now on
  std::array<std::atomic<size_t>, 16> roundup_power2_divisions; // by power of two from 1 MiB on
};

// Valid after load_allocator_settings().
const AllocatorSettings& allocator_settings();
// Reads the environment at first call. Throws ValueError for a malformed string, again and again until it is mended.
void load_allocator_settings();
// As PyTorch's setAllocatorSettings, but refuses a malformed string, which it would take in part, with a ValueError.
void set_allocator_settings(const std::string& settings);
// The string that was last accepted.
std::string allocator_settings_text();
// Makes the options of our own known to PyTorch's parser; called once, when the module is loaded.
void register_allocator_options();

} // namespace backplane
