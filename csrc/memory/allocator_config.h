// The settings of PYTORCH_ALLOC_CONF, for the allocators of this process.
//
// PyTorch's shared parser (c10::CachingAllocator::AcceleratorAllocatorConfig) handles the options of all accelerators.
// Options that only torch.cuda's parser handles are registered here, so that one string works for both.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <string>

namespace backplane {

// A copy of PyTorch's settings that the hot path reads without a call; updated whenever they are set.
struct AllocatorSettings {
  std::atomic<size_t> large_segment_size;
  std::atomic<size_t> max_split_size;
  std::atomic<size_t> max_non_split_rounding_size;
  std::atomic<double> garbage_collection_threshold;
  std::atomic<bool> expandable_segments;
  std::atomic<double> per_process_memory_fraction; // for devices that are first used later
  std::array<std::atomic<size_t>, 16> roundup_power2_divisions; // by powers of two, from 1 MiB on
};

// Valid after load_allocator_settings().
const AllocatorSettings& allocator_settings();
// Reads the environment at the first call. Throws ValueError for a malformed string, also in later calls.
void load_allocator_settings();
// Like PyTorch's setAllocatorSettings, but throws ValueError for a malformed string, which PyTorch would apply in part.
void set_allocator_settings(const std::string& settings);
// The last string that was accepted.
std::string allocator_settings_text();
// Registers the additional options with PyTorch's parser; called once, when the module is loaded.
void register_allocator_options();

} // namespace backplane
