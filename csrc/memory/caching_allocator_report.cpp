// Statistics, snapshots and history of an allocator.
#include "memory/caching_allocator.h"

#include "compat.h"

#include <algorithm>

namespace backplane {

c10::CachingDeviceAllocator::DeviceStats DeviceCachingAllocator::stats() {
  Lock lock(mutex_);
  return stats_;
}

namespace {

template <typename Stats, typename Visit>
void for_each_stat(Stats& stats, Visit visit) {
  for (auto* array :
       {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
        &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes}) {
    for (auto& stat : *array) {
      visit(stat);
    }
  }
  visit(stats.oversize_allocations);
  visit(stats.oversize_segments);
  compat::with_private_pool_stats(stats, [&](auto& by_pool) {
    for (auto& pool : by_pool) {
      for (auto& stat : pool.second) {
        visit(stat);
      }
    }
  });
}

} // namespace

void DeviceCachingAllocator::reset_accumulated_stats() {
  Lock lock(mutex_);
  for_each_stat(stats_, [](auto& stat) { stat.reset_accumulated(); });
  stats_.num_alloc_retries = 0;
  stats_.num_ooms = 0;
  stats_.num_sync_all_streams = 0;
  stats_.num_device_alloc = 0;
  stats_.num_device_free = 0;
}

void DeviceCachingAllocator::reset_peak_stats() {
  Lock lock(mutex_);
  for_each_stat(stats_, [](auto& stat) { stat.reset_peak(); });
}

std::vector<SegmentInfo> DeviceCachingAllocator::snapshot(c10::MempoolId_t pool) {
  Lock lock(mutex_);
  std::vector<SegmentInfo> result;
  size_t active = 0;
  for (const Segment* segment : segments_) {
    if (pool != c10::MempoolId_t{0, 0} && id_of(*segment->pool) != pool) {
      continue;
    }
    // Each run of mapped blocks is reported as one segment.
    for (const Block* block = segment->first; block != nullptr; block = block->next) {
      if (!block->mapped) {
        continue;
      }
      if (block->previous == nullptr || !block->previous->mapped) {
        SegmentInfo& info = result.emplace_back();
        info.address = reinterpret_cast<size_t>(block->address);
        info.stream = segment->stream;
        info.large = !segment->pool->small;
        info.expandable = segment->is_expandable();
        info.pool = id_of(*segment->pool);
        info.context = segment->context;
      }
      SegmentInfo& info = result.back();
      info.blocks.push_back(
          {reinterpret_cast<size_t>(block->address), block->size, block->requested, block->allocated,
           block->is_active(), block->context});
      info.total_size += block->size;
      info.allocated_size += block->allocated ? block->size : 0;
      if (block->is_active()) {
        info.active_size += block->size;
        info.requested_size += block->requested;
        active += block->size;
      }
    }
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.address < b.address; });
  history_.record(TraceAction::Snapshot, nullptr, active, 0, {0, 0}, nullptr);
  return result;
}

std::vector<TraceEntry> DeviceCachingAllocator::trace() {
  Lock lock(mutex_);
  return history_.entries();
}

Context DeviceCachingAllocator::allocation_context(Segment* segment, void* pointer) {
  Lock lock(mutex_);
  return allocated_block(segment, pointer)->context;
}

void DeviceCachingAllocator::record_history(const HistorySettings& settings, bool clear) {
  Lock lock(mutex_);
  history_.configure(settings, clear);
}

bool DeviceCachingAllocator::history_enabled() {
  Lock lock(mutex_);
  return history_.enabled();
}

void DeviceCachingAllocator::set_metadata(const std::string& metadata) {
  Lock lock(mutex_);
  history_.set_metadata(metadata);
}

void DeviceCachingAllocator::attach_out_of_memory_observer(OutOfMemoryObserver observer) {
  Lock lock(mutex_);
  observers_.push_back(std::move(observer));
}

} // namespace backplane
