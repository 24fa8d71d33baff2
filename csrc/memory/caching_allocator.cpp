// Allocating and freeing: the hot path.
#include "memory/caching_allocator.h"

#include "memory/allocator_config.h"
#include "memory/segment_map.h"

#include <c10/util/Exception.h>
#include <c10/util/llvmMathExtras.h>

namespace backplane {

namespace {

constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

// Rounds up to the next of `divisions` equal steps between two powers of two.
size_t round_to_division(size_t size, size_t divisions) {
  if (size <= 4 || divisions <= 1 || c10::llvm::isPowerOf2_64(size)) {
    return size;
  }
  size_t step = c10::llvm::PowerOf2Floor(size) >> (63 - c10::llvm::countLeadingZeros(divisions));
  if (step == 0) {
    return c10::llvm::PowerOf2Floor(size) << 1;
  }
  return (size + step - 1) & ~(step - 1);
}

size_t round_size(size_t size) {
  if (size < kMinBlock) {
    return kMinBlock;
  }
  // Interval 0 has all sizes below 2 MiB, the last one all sizes from 32 GiB on.
  int log2 = 63 - static_cast<int>(c10::llvm::countLeadingZeros(size));
  const auto& all = allocator_settings().roundup_power2_divisions;
  size_t divisions = all[std::clamp(log2 - 20, 0, static_cast<int>(all.size()) - 1)].load(std::memory_order_relaxed);
  if (divisions > 0 && size > kMinBlock * divisions) {
    return round_to_division(size, divisions);
  }
  return (size + kMinBlock - 1) / kMinBlock * kMinBlock;
}

size_t segment_size_for(size_t size) {
  if (size <= kSmallSize) {
    return kSmallSegment;
  }
  if (size < kMinLargeAlloc) {
    return allocator_settings().large_segment_size;
  }
  return (size + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
}

} // namespace

FreeBlocks& BlockPool::of(c10::StreamId stream) {
  auto index = static_cast<size_t>(stream);
  if (C10_UNLIKELY(index >= free_blocks.size())) {
    free_blocks.resize(index + 1);
  }
  auto& blocks = free_blocks[index];
  if (C10_UNLIKELY(blocks == nullptr)) {
    blocks = std::make_unique<FreeBlocks>(stream, small);
  }
  return *blocks;
}

DeviceCachingAllocator::DeviceCachingAllocator(c10::DeviceIndex index) : index_(index), device_(device(index)) {
  load_allocator_settings();
  DeviceCall call(device_);
  total_memory_ = device_.memory_info().second;
  can_reserve_ = device_.can_reserve();
  stats_.max_split_size = static_cast<int64_t>(allocator_settings().max_split_size);
  if (allocator_settings().per_process_memory_fraction < 1.0) {
    fraction_ = allocator_settings().per_process_memory_fraction;
  }
}

// --- requests --------------------------------------------------------------------------------------------------------

void* DeviceCachingAllocator::allocate(size_t bytes, c10::StreamId stream, bool uncached) {
  device_.check_not_lost(); // cached memory of a lost device is useless, too
  Context context = gather(RecordContext::State); // before the lock, because it can need the GIL
  Lock lock(mutex_);
  if (C10_UNLIKELY(!pending_.empty())) {
    process_events(lock, context);
  }
  Request request = make_request(bytes, stream, uncached, std::move(context));
  Block* block = uncached ? nullptr : find_free(request, /*count=*/true);
  if (C10_UNLIKELY(block == nullptr)) {
    block = find_or_obtain(lock, request);
  }
  void* pointer = hand_out(request, block);
  size_t size = block->size;
  size_t allocated = stats_.allocated_bytes[0].current;
  size_t reserved = stats_.reserved_bytes[0].current;
  lock.unlock();
  c10::reportMemoryUsageToProfiler(
      pointer, static_cast<int64_t>(size), allocated, reserved, c10::Device(c10::kPrivateUse1, index_));
  return pointer;
}

DeviceCachingAllocator::Request DeviceCachingAllocator::make_request(
    size_t bytes, c10::StreamId stream, bool uncached, Context context) {
  size_t size = round_size(bytes);
  size_t segment_size = uncached ? (size + kRoundLarge - 1) / kRoundLarge * kRoundLarge : segment_size_for(size);
  return {bytes, size, segment_size, stream, &pool_for(size, stream), uncached, std::move(context)};
}

BlockPool& DeviceCachingAllocator::pool_for(size_t size, c10::StreamId stream) {
  bool small = size <= kSmallSize;
  if (C10_UNLIKELY(!active_pools_.empty())) {
    // The latest pool that accepts this stream.
    for (auto entry = active_pools_.rbegin(); entry != active_pools_.rend(); ++entry) {
      if (entry->second(stream)) {
        PrivatePool& pool = *private_pools_.at(entry->first);
        return small ? pool.small : pool.large;
      }
    }
  }
  return small ? small_ : large_;
}

Block* DeviceCachingAllocator::find_free(const Request& request, bool count) {
  const AllocatorSettings& settings = allocator_settings();
  BlockPool& pool = *request.pool;
  if (C10_UNLIKELY(count && settings.garbage_collection_threshold.load(std::memory_order_relaxed) > 0.0)) {
    ++pool.searches;
  }
  FreeBlocks& blocks = pool.of(request.stream);
  Block* block = blocks.at_least(request.size);
  if (block == nullptr) {
    return nullptr;
  }
  if (C10_UNLIKELY(block->segment->is_expandable())) {
    if (expandable()) {
      // A block with unmapped space behind it counts with the size that it could grow to, so that it is not split while
      // another block would fit.
      auto reach = [](const Block* b) {
        return b->size + (b->next != nullptr && !b->next->mapped ? b->next->size : 0);
      };
      for (Block* next = blocks.next(block);
           block->segment->is_expandable() && next != nullptr && reach(next) < reach(block); next = blocks.next(next)) {
        block = next;
      }
    } else {
      // Expandable segments have been switched off: only blocks of ordinary segments can be used.
      while (block != nullptr && block->segment->is_expandable()) {
        block = blocks.next(block);
      }
      if (block == nullptr) {
        return nullptr;
      }
    }
  }
  size_t limit = settings.max_split_size.load(std::memory_order_relaxed);
  if (C10_UNLIKELY(limit != kNoLimit)) {
    // Blocks of at least the limit are not split: they serve only requests that are nearly as large.
    if (request.size < limit && block->size >= limit) {
      return nullptr;
    }
    if (request.size >= limit && block->size >= request.size + settings.max_non_split_rounding_size) {
      return nullptr;
    }
  }
  blocks.erase(block);
  return block;
}

Block* DeviceCachingAllocator::find_or_obtain(Lock& lock, Request& request) {
  // Keeps a private pool alive during this request, which releases the lock.
  struct Guard {
    Guard(Lock& lock, PrivatePool* pool) : lock(lock), pool(pool) {
      if (pool != nullptr) {
        ++pool->allocating;
      }
    }
    ~Guard() {
      if (pool != nullptr) {
        if (!lock.owns_lock()) {
          lock.lock(); // out_of_memory has released it
        }
        --pool->allocating;
      }
    }
    Lock& lock;
    PrivatePool* pool;
  } guard(lock, request.pool->owner);

  if (exceeds_device(request)) {
    out_of_memory(lock, request); // freed memory would not help
  }
  if (request.uncached) {
    Block* block = obtain_segment(lock, request, /*retry=*/false);
    if (block == nullptr && release_cached(lock, {0, 0}, request.context)) {
      block = obtain_segment(lock, request, /*retry=*/true);
    }
    return block != nullptr ? block : (out_of_memory(lock, request), nullptr);
  }
  if (allocator_settings().garbage_collection_threshold > 0.0) {
    collect_garbage(lock, request.context);
  }
  Block* block = obtain_segment(lock, request, /*retry=*/false);
  if (block == nullptr) {
    // Another thread may have freed something while the lock was released.
    block = find_free(request, /*count=*/false);
  }
  if (block == nullptr && release_oversize(lock, request)) {
    block = obtain_segment(lock, request, /*retry=*/false);
  }
  if (block == nullptr && release_cached(lock, {0, 0}, request.context)) {
    block = obtain_segment(lock, request, /*retry=*/true);
  }
  if (block == nullptr) {
    block = find_free(request, /*count=*/false);
  }
  if (block == nullptr) {
    block = take_from_last_resort(request);
  }
  return block != nullptr ? block : (out_of_memory(lock, request), nullptr);
}

bool DeviceCachingAllocator::expandable() const {
  return can_reserve_ && allocator_settings().expandable_segments.load(std::memory_order_relaxed);
}

// True if the device cannot allocate a segment of this size even when all of its memory is free.
bool DeviceCachingAllocator::exceeds_device(const Request& request) const {
  bool is_device_allocation = !source_of(*request.pool).has_value() && (request.uncached || !expandable());
  return is_device_allocation && request.segment_size > device_.properties().largest_allocation;
}

bool DeviceCachingAllocator::should_split(const Block* block, size_t size) const {
  const BlockPool& pool = *block->segment->pool;
  if (block->segment->uncached || (pool.owner != nullptr && pool.owner->no_split)) {
    return false;
  }
  size_t remaining = block->size - size;
  const AllocatorSettings& settings = allocator_settings();
  if (pool.small || expandable()) {
    return remaining >= kMinBlock;
  }
  return size < settings.max_split_size.load(std::memory_order_relaxed) && remaining > kSmallSize;
}

// Allocates from a block that is in no list, and adds the rest to the free blocks.
void* DeviceCachingAllocator::hand_out(const Request& request, Block* block) {
  Segment* segment = block->segment;
  BlockPool& pool = *segment->pool;
  bool was_split = block->is_split();
  if (should_split(block, request.size)) {
    Block* rest = new_block(segment, block->address + request.size, block->size - request.size);
    block->size = request.size;
    rest->previous = block;
    rest->next = block->next;
    if (rest->next != nullptr) {
      rest->next->previous = rest;
    }
    block->next = rest;
    insert_free(rest);
    if (!segment->is_expandable()) {
      if (was_split) {
        decrease(stats_.inactive_split_bytes, pool, block->size);
      } else {
        increase(stats_.inactive_split_bytes, pool, rest->size);
        increase(stats_.inactive_split, pool, 1);
      }
    }
  } else if (was_split && !segment->is_expandable()) {
    decrease(stats_.inactive_split_bytes, pool, block->size);
    decrease(stats_.inactive_split, pool, 1);
  }

  block->allocated = true;
  block->requested = request.bytes;
  block->context = request.context;
  segment->slot(block->address) = block;
  if (C10_UNLIKELY(history_.enabled())) {
    history_.record(TraceAction::Alloc, block->address, request.bytes, segment->stream, id_of(pool), request.context);
  }
  increase(stats_.allocation, pool, 1);
  increase(stats_.allocated_bytes, pool, block->size);
  increase(stats_.active, pool, 1);
  increase(stats_.active_bytes, pool, block->size);
  increase(stats_.requested_bytes, pool, block->requested);
  if (C10_UNLIKELY(block->size >= allocator_settings().max_split_size.load(std::memory_order_relaxed))) {
    stats_.oversize_allocations.increase(1);
  }
  return block->address;
}

void DeviceCachingAllocator::out_of_memory(Lock& lock, const Request& request) {
  using c10::CachingAllocator::format_size;
  auto [free_bytes, total] = outside(lock, [&] { return device_.memory_info(); });
  stats_.num_ooms += 1;
  history_.record(
      TraceAction::OutOfMemory, reinterpret_cast<void*>(free_bytes), request.size, request.stream, id_of(*request.pool),
      request.context);
  size_t allocated = stats_.allocated_bytes[0].current;
  size_t reserved = stats_.reserved_bytes[0].current;
  size_t cached_in_private_pools = 0; // other pools cannot use it, so it counts as allocated
  for (Segment* segment : segments_) {
    for (Block* block = segment->first; block != nullptr; block = block->next) {
      if (segment->pool->owner != nullptr && block->mapped && block->is_free()) {
        cached_in_private_pools += block->size;
      }
    }
  }
  std::string allowed_info = fraction_.has_value() ? format_size(allowed()) + " allowed; " : "";
  std::string private_info = cached_in_private_pools > 0
      ? "with " + format_size(cached_in_private_pools) + " allocated in private pools (e.g., graphs), "
      : "";
  const size_t largest = device_.properties().largest_allocation;
  std::string largest_info =
      exceeds_device(request) ? " The device allocates at most " + format_size(largest) + " at a time." : "";
  std::string advice = can_reserve_
      ? " If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid"
        " fragmentation."
      : "";
  size_t limit = fraction_.has_value() ? allowed() : total;
  auto observers = observers_;
  lock.unlock(); // an observer can need the GIL

  c10::reportOutOfMemoryToProfiler(
      static_cast<int64_t>(request.size), allocated, reserved, c10::Device(c10::kPrivateUse1, index_));
  for (const auto& observer : observers) {
    observer(index_, request.segment_size, limit, free_bytes);
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "bp out of memory. Tried to allocate ", format_size(request.segment_size), ". Device ",
      static_cast<int>(index_), " has a total capacity of ", format_size(total), " of which ", format_size(free_bytes),
      " is free. ", allowed_info, "Of the allocated memory ", format_size(allocated + cached_in_private_pools),
      " is allocated by PyTorch, ", private_info, "and ", format_size(reserved - allocated - cached_in_private_pools),
      " is reserved by PyTorch but unallocated.", largest_info, advice,
      " See documentation for Memory Management "
      "(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-memory-management)");
}

// --- frees -----------------------------------------------------------------------------------------------------------

Block* DeviceCachingAllocator::allocated_block(Segment* segment, void* pointer) const {
  Block* block = segment->allocator == this && segment->contains(pointer) ? segment->slot(pointer) : nullptr;
  TORCH_CHECK(
      block != nullptr && block->address == pointer, "invalid device pointer: ", pointer,
      " is not allocated on bp:", static_cast<int>(index_), " (freed twice, or not the start of an allocation)");
  return block;
}

void DeviceCachingAllocator::free(Segment* segment, void* pointer) {
  Context context = gather(RecordContext::All);
  Lock lock(mutex_);
  Block* block = allocated_block(segment, pointer);
  segment->slot(pointer) = nullptr;
  block->allocated = false;
  BlockPool& pool = *segment->pool;
  size_t size = block->size;
  decrease(stats_.allocation, pool, 1);
  decrease(stats_.allocated_bytes, pool, size);
  if (C10_UNLIKELY(size >= allocator_settings().max_split_size.load(std::memory_order_relaxed))) {
    stats_.oversize_allocations.decrease(1);
  }
  if (C10_UNLIKELY(history_.enabled())) {
    history_.record(
        TraceAction::FreeRequested, pointer, block->requested, segment->stream, id_of(pool),
        context ? context : block->context);
  }
  if (C10_UNLIKELY(!block->stream_uses.empty())) {
    free_after_streams(lock, block, context);
  } else if (Segment* unused = make_free(block, context); C10_UNLIKELY(unused != nullptr)) {
    give_back(lock, {unused});
  }
  size_t allocated = stats_.allocated_bytes[0].current;
  size_t reserved = stats_.reserved_bytes[0].current;
  lock.unlock();
  c10::reportMemoryUsageToProfiler(
      pointer, -static_cast<int64_t>(size), allocated, reserved, c10::Device(c10::kPrivateUse1, index_));
}

Segment* DeviceCachingAllocator::make_free(Block* block, const Context& context) {
  Segment* segment = block->segment;
  BlockPool& pool = *segment->pool;
  if (C10_UNLIKELY(history_.enabled())) {
    history_.record(
        TraceAction::FreeCompleted, block->address, block->requested, segment->stream, id_of(pool),
        context ? context : block->context);
  }
  if (C10_UNLIKELY(block->context != nullptr)) {
    block->context = nullptr;
  }
  decrease(stats_.active, pool, 1);
  decrease(stats_.active_bytes, pool, block->size);
  decrease(stats_.requested_bytes, pool, block->requested);
  block->requested = 0;

  int64_t split_blocks = 0; // changes of inactive_split
  int64_t split_bytes = 0;
  for (Block* neighbour : {block->previous, block->next}) {
    int64_t merged = 0;
    block = merge_if_free(block, neighbour, &merged);
    split_blocks -= merged > 0;
    split_bytes -= merged;
  }
  if (C10_UNLIKELY(segment->uncached)) {
    return detach(segment, context);
  }
  insert_free(block);
  if (block->is_split()) {
    split_blocks += 1;
    split_bytes += static_cast<int64_t>(block->size);
  }
  // Whole pages of expandable segments can always be returned to the device, so this statistic excludes them.
  if (!segment->is_expandable()) {
    auto shift = [&](auto& stat, int64_t by) {
      by > 0 ? increase(stat, pool, by) : by < 0 ? decrease(stat, pool, -by) : void();
    };
    shift(stats_.inactive_split, split_blocks);
    shift(stats_.inactive_split_bytes, split_bytes);
  }
  return nullptr;
}

// Merges a block that is in no list with a neighbour that is free and equally mapped. Returns the remaining block.
Block* DeviceCachingAllocator::merge_if_free(Block* block, Block* neighbour, int64_t* merged_bytes) {
  if (neighbour == nullptr || !neighbour->is_free() || neighbour->mapped != block->mapped) {
    return block;
  }
  if (neighbour->mapped) {
    neighbour->segment->free_blocks->erase(neighbour);
  } else {
    neighbour->segment->pool->unmapped.erase(neighbour);
  }
  *merged_bytes = static_cast<int64_t>(neighbour->size);
  Block* left = neighbour == block->previous ? neighbour : block;
  Block* right = left->next;
  left->size += right->size;
  left->next = right->next;
  if (left->next != nullptr) {
    left->next->previous = left;
  }
  recycle(right);
  return left;
}

void DeviceCachingAllocator::insert_free(Block* block) {
  block->free_since = block->segment->pool->searches;
  block->segment->free_blocks->insert(block);
}

Block* DeviceCachingAllocator::new_block(Segment* segment, char* address, size_t size) {
  Block* block;
  if (C10_LIKELY(!spare_blocks_.empty())) {
    block = spare_blocks_.back();
    spare_blocks_.pop_back();
  } else {
    block = new Block;
    priority_ = priority_ * 1664525 + 1013904223; // Knuth's linear congruential generator
    block->priority = priority_;
  }
  block->segment = segment;
  block->address = address;
  block->size = size;
  return block;
}

void DeviceCachingAllocator::recycle(Block* block) {
  block->segment = nullptr;
  block->previous = block->next = nullptr;
  block->allocated = block->busy = false;
  block->mapped = true;
  spare_blocks_.push_back(block);
}

void DeviceCachingAllocator::record_stream(Segment* segment, void* pointer, c10::Stream stream) {
  Lock lock(mutex_);
  Block* block = allocated_block(segment, pointer);
  if (stream.id() == segment->stream && stream.device_index() == index_) {
    return; // uses on the block's own stream are in order
  }
  auto& uses = block->stream_uses;
  if (std::find(uses.begin(), uses.end(), stream) == uses.end()) {
    uses.push_back(stream);
  }
}

std::pair<void*, size_t> DeviceCachingAllocator::base_allocation(Segment* segment, void* pointer) {
  Lock lock(mutex_);
  allocated_block(segment, pointer);
  return {segment->begin(), segment->bytes()};
}

} // namespace backplane
