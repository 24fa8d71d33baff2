// Allocating segments and returning them to the device: the slow path.
#include "memory/caching_allocator.h"

#include "compat.h"
#include "devices/driver_call.h"
#include "memory/allocator_config.h"
#include "memory/segment_map.h"
#include "streams/stream.h"

#include <c10/util/Exception.h>

namespace backplane {

void DeviceCachingAllocator::increase_reserved(const BlockPool& pool, size_t amount) {
  increase(stats_.reserved_bytes, pool, amount);
  if (pool.owner != nullptr) {
    compat::with_private_pool_stats(stats_, [&](auto& by_pool) { increase(by_pool[pool.owner->id], pool, amount); });
  }
}

void DeviceCachingAllocator::decrease_reserved(const BlockPool& pool, size_t amount) {
  decrease(stats_.reserved_bytes, pool, amount);
  if (pool.owner != nullptr) {
    compat::with_private_pool_stats(stats_, [&](auto& by_pool) { decrease(by_pool[pool.owner->id], pool, amount); });
  }
}

// Returns a free block that is in no list, or nullptr if the device is out of memory or the limit is reached.
Block* DeviceCachingAllocator::obtain_segment(Lock& lock, Request& request, bool retry) {
  stats_.num_alloc_retries += retry;
  size_t size = request.segment_size;
  give_back(lock, {}); // the deferred segments
  if (fraction_.has_value() && reserved_ + size > allowed()) {
    return nullptr;
  }
  if (allocator_settings().expandable_segments && !can_reserve_ && !warned_about_expandable_) {
    warned_about_expandable_ = true;
    lock.unlock(); // a warning needs the GIL
    TORCH_WARN(
        "expandable_segments is not supported by bp:", static_cast<int>(index_),
        ": its driver cannot reserve address space");
    lock.lock();
  }
  const auto source = source_of(*request.pool);
  if (expandable() && !request.uncached && !source.has_value()) {
    return expand(lock, request);
  }
  reserved_ += size; // other threads must not exceed the limit meanwhile
  void* address = nullptr;
  Segment* segment = nullptr;
  try {
    address = outside(lock, [&] { return take_memory(source, size, request.stream); });
    if (address != nullptr) {
      segment = new_segment(request, static_cast<char*>(address), size, /*page=*/0);
      segment->source = source;
    }
  } catch (...) {
    if (address != nullptr) {
      outside(lock, [&] { return_memory(source, address, size, request.stream); });
    }
    reserved_ -= size;
    throw;
  }
  if (address == nullptr) {
    reserved_ -= size;
    return nullptr;
  }
  increase(stats_.segment, *segment->pool, 1);
  increase_reserved(*segment->pool, size);
  if (size >= allocator_settings().max_split_size) {
    stats_.oversize_segments.increase(1);
  }
  stats_.num_device_alloc += 1;
  has_allocated_ = true;
  history_.record(TraceAction::SegmentAlloc, address, size, segment->stream, id_of(*segment->pool), request.context);
  return segment->first;
}

std::optional<MemorySource> DeviceCachingAllocator::source_of(const BlockPool& pool) const {
  return pool.owner != nullptr && pool.owner->source.has_value() ? pool.owner->source : source_;
}

void* DeviceCachingAllocator::take_memory(
    const std::optional<MemorySource>& source, size_t bytes, c10::StreamId stream) {
  if (!source.has_value()) {
    return device_.allocate(bytes);
  }
  constexpr uintptr_t kAlignment = 16; // as of malloc: CPU kernels rely on no larger alignment
  const auto queue = stream_identity(c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, index_), stream));
  void* memory = source->allocate(static_cast<std::ptrdiff_t>(bytes), index_, queue);
  if (reinterpret_cast<uintptr_t>(memory) % kAlignment != 0) {
    source->free(memory, static_cast<std::ptrdiff_t>(bytes), index_, queue);
    TORCH_CHECK(
        false, "the pluggable allocator returned the address ", memory, ", which is not a multiple of ", kAlignment);
  }
  return memory;
}

void DeviceCachingAllocator::return_memory(
    const std::optional<MemorySource>& source, void* memory, size_t bytes, c10::StreamId stream) {
  if (!source.has_value()) {
    device_.free(memory, bytes);
    return;
  }
  // The device waits for work on its own memory. Another source does not.
  const auto queue = stream_identity(c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, index_), stream));
  device_.synchronize_stream(queue);
  source->free(memory, static_cast<std::ptrdiff_t>(bytes), index_, queue);
}

void DeviceCachingAllocator::check_takes_any_memory() const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      device_.properties().host_accessible(), "bp:", static_cast<int>(index_), " (", device_.properties().name,
      ") accepts only memory of its driver, so it does not support pluggable allocators; devices in host memory do");
}

void DeviceCachingAllocator::check_may_set_source() {
  check_takes_any_memory();
  Lock lock(mutex_);
  check_has_not_allocated();
}

void DeviceCachingAllocator::set_source(MemorySource source) {
  check_takes_any_memory();
  Lock lock(mutex_);
  check_has_not_allocated();
  source_ = source;
}

// Called with the lock held.
void DeviceCachingAllocator::check_has_not_allocated() const {
  TORCH_CHECK(
      !has_allocated_, "bp:", static_cast<int>(index_),
      " has already allocated memory, and its allocator can only be changed before that");
}

// Changes nothing if it throws.
Segment* DeviceCachingAllocator::new_segment(const Request& request, char* address, size_t size, size_t page) {
  const int slot_shift = request.pool->small ? 9 : 20;
  decltype(Segment::slots) slots(
      static_cast<Block**>(std::calloc((size >> slot_shift) + 1, sizeof(Block*))), &std::free);
  TORCH_CHECK(slots != nullptr, "cannot allocate the block table of a segment of ", size, " bytes");
  Segment* segment;
  if (spare_segments_.empty()) {
    segment = new Segment;
  } else {
    segment = spare_segments_.back();
    spare_segments_.pop_back();
  }
  segment->pool = request.pool;
  segment->free_blocks = &request.pool->of(request.stream);
  segment->stream = request.stream;
  segment->first = new_block(segment, address, size);
  segment->index = segments_.size();
  segment->page = page;
  segment->uncached = request.uncached;
  segment->source.reset();
  segment->context = request.context;
  segment->slot_shift = slot_shift;
  segment->slots = std::move(slots);
  segment->allocator = this;
  try {
    segment_map().add(segment, address, size);
  } catch (const std::exception&) {
    segment->allocator = nullptr;
    segment->context = nullptr;
    segment->slots.reset();
    recycle(segment->first);
    spare_segments_.push_back(segment);
    throw;
  }
  segments_.push_back(segment);
  if (request.pool->owner != nullptr) {
    request.pool->owner->segments += 1;
  }
  return segment;
}

// Removes a segment whose only block is in no list from the allocator. The caller must pass it to give_back().
Segment* DeviceCachingAllocator::detach(Segment* segment, const Context& context) {
  BlockPool& pool = *segment->pool;
  size_t size = segment->bytes();
  if (!segment->is_expandable()) {
    history_.record(
        TraceAction::SegmentFree, segment->begin(), size, segment->stream, id_of(pool),
        context ? context : segment->context);
    decrease(stats_.segment, pool, 1);
    decrease_reserved(pool, size);
    if (size >= allocator_settings().max_split_size) {
      stats_.oversize_segments.decrease(1);
    }
    stats_.num_device_free += 1;
  }
  if (pool.owner != nullptr) {
    pool.owner->segments -= 1;
  }
  recycle(segment->first);
  segment_map().remove(segment);
  segments_[segment->index] = segments_.back();
  segments_[segment->index]->index = segment->index;
  segments_.pop_back();
  segment->allocator = nullptr;
  segment->context = nullptr;
  return segment;
}

// Returns detached segments to the device: `more` and those that were deferred. Inside a driver call it defers them. A
// segment that the device fails to take back counts as returned, since nothing can use it. Throws the first failure,
// which can be an earlier one: `failure`.
void DeviceCachingAllocator::give_back(Lock& lock, const std::vector<Segment*>& more, std::exception_ptr failure) {
  unreturned_.insert(unreturned_.end(), more.begin(), more.end());
  std::vector<Segment*> segments;
  if (!unreturned_.empty() && !inside_driver_call()) {
    segments.swap(unreturned_);
    outside(lock, [&] {
      for (Segment* segment : segments) {
        try {
          if (segment->is_expandable()) {
            device_.unreserve(segment->begin(), segment->bytes());
          } else {
            return_memory(segment->source, segment->begin(), segment->bytes(), segment->stream);
          }
        } catch (const std::exception&) {
          failure = failure == nullptr ? std::current_exception() : failure;
        }
      }
    });
  }
  for (Segment* segment : segments) {
    if (!segment->is_expandable()) {
      reserved_ -= segment->bytes();
    }
    segment->slots.reset();
    spare_segments_.push_back(segment);
  }
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
}

// Returns large segments that have been free for long, if more than the threshold is reserved.
void DeviceCachingAllocator::collect_garbage(Lock& lock, const Context& context) {
  auto threshold =
      static_cast<size_t>(allocator_settings().garbage_collection_threshold * static_cast<double>(allowed()));
  if (reserved_ <= threshold) {
    return;
  }
  size_t target = reserved_ - threshold;
  auto age = [&](const Segment* segment) { return static_cast<double>(large_.searches - segment->first->free_since); };
  std::vector<Segment*> candidates;
  double total_age = 0;
  for (Segment* segment : segments_) {
    if (segment->pool == &large_ && !segment->is_expandable() && !segment->first->is_split() &&
        segment->first->is_free()) {
      candidates.push_back(segment);
      total_age += age(segment);
    }
  }
  std::vector<Segment*> unused;
  size_t reclaimed = 0;
  while (reclaimed < target && !candidates.empty()) {
    double mean_age = total_age / static_cast<double>(candidates.size());
    std::vector<Segment*> younger;
    for (Segment* segment : candidates) {
      // Return all of at least the mean age, even if fewer would be enough, so that this does not run again soon.
      if (age(segment) >= mean_age) {
        reclaimed += segment->bytes();
        total_age -= age(segment);
        segment->free_blocks->erase(segment->first);
        unused.push_back(detach(segment, context));
      } else {
        younger.push_back(segment);
      }
    }
    if (younger.size() == candidates.size()) {
      break;
    }
    candidates = std::move(younger);
  }
  give_back(lock, unused);
}

// With max_split_size_mb: returns just enough of the blocks that are never split. True if that can be enough.
bool DeviceCachingAllocator::release_oversize(Lock& lock, const Request& request) {
  size_t limit = allocator_settings().max_split_size;
  if (limit == std::numeric_limits<size_t>::max()) {
    return false;
  }
  size_t wanted = std::max(request.size, limit);
  FreeBlocks& blocks = request.pool->of(request.stream);
  auto releasable = [](const Block* block) { return !block->is_split() && !block->segment->is_expandable(); };
  std::vector<Segment*> unused;
  size_t released = 0;
  if (Block* fitting = blocks.at_least(wanted)) {
    if (!releasable(fitting)) {
      return false;
    }
    blocks.erase(fitting);
    released = fitting->size;
    unused.push_back(detach(fitting->segment, request.context));
  } else {
    Block* largest = blocks.largest();
    while (released < wanted && largest != nullptr && largest->size >= limit && releasable(largest)) {
      released += largest->size;
      blocks.erase(largest);
      unused.push_back(detach(largest->segment, request.context));
      largest = blocks.largest();
    }
  }
  give_back(lock, unused);
  return released >= wanted;
}

// Returns every segment that is entirely free: of the device's pools and of private pools without users, or only of one
// such private pool.
bool DeviceCachingAllocator::release_cached(Lock& lock, c10::MempoolId_t only, const Context& context) {
  synchronize_events(lock, context);
  bool all = only == c10::MempoolId_t{0, 0};
  auto selected = [&](const BlockPool& pool) {
    return pool.owner == nullptr ? all : pool.owner->use_count == 0 && (all || pool.owner->id == only);
  };
  std::vector<Segment*> unused;
  for (size_t i = 0; i < segments_.size();) {
    Segment* segment = segments_[i];
    if (selected(*segment->pool) && !segment->is_expandable() && !segment->first->is_split() &&
        segment->first->is_free()) {
      segment->free_blocks->erase(segment->first);
      unused.push_back(detach(segment, context)); // moves another segment to this index
    } else {
      ++i;
    }
  }
  give_back(lock, unused);
  unmap_free_pages(lock, selected, context);
  for (auto entry = private_pools_.begin(); entry != private_pools_.end();) {
    const PrivatePool& pool = *entry->second;
    bool gone = pool.use_count == 0 && pool.segments == 0 && pool.allocating == 0;
    entry = gone ? private_pools_.erase(entry) : std::next(entry);
  }
  return true;
}

Block* DeviceCachingAllocator::take_from_last_resort(const Request& request) {
  if (request.pool->owner != nullptr) {
    return nullptr;
  }
  for (auto& [id, pool] : private_pools_) {
    if (pool->use_on_oom) {
      Request there = request;
      there.pool = request.pool->small ? &pool->small : &pool->large;
      if (Block* block = find_free(there, /*count=*/false)) {
        return block;
      }
    }
  }
  return nullptr;
}

void DeviceCachingAllocator::empty_cache(c10::MempoolId_t pool) {
  Context context = gather(RecordContext::All);
  Lock lock(mutex_);
  release_cached(lock, pool, context);
}

void DeviceCachingAllocator::set_memory_fraction(double fraction) {
  Lock lock(mutex_);
  fraction_ = fraction;
}

double DeviceCachingAllocator::memory_fraction() {
  Lock lock(mutex_);
  return fraction_.value_or(1.0);
}

} // namespace backplane
