// Data of the caching allocator: segments (allocations of the device) and blocks (parts of segments, for tensors).
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "memory/memory_source.h"

namespace backplane {

class DeviceCachingAllocator;
class FreeBlocks;
struct BlockPool;
struct Segment;

using Context = std::shared_ptr<c10::GatheredContext>;

// All block sizes are multiples of this; segment sizes are multiples of kSmallSegment.
constexpr size_t kMinBlock = 512;
constexpr size_t kSmallSize = size_t{1} << 20; // the largest request that the small pool serves
constexpr size_t kSmallSegment = size_t{2} << 20;
constexpr size_t kMinLargeAlloc = size_t{10} << 20; // from this size on, a new segment has the size of the request
constexpr size_t kRoundLarge = size_t{2} << 20;

struct Block {
  Segment* segment = nullptr;
  char* address = nullptr;
  size_t size = 0;
  size_t requested = 0; // bytes that the caller requested
  Block* previous = nullptr; // neighbours by address in the same segment
  Block* next = nullptr;

  Block* left = nullptr; // links of FreeBlocks
  Block* right = nullptr;
  uint32_t priority = 0;

  bool allocated = false; // in use by a tensor
  bool mapped = true; // backed by memory; false only in expandable segments
  bool busy = false; // being mapped or unmapped with the lock released: no other thread may use it
  int events = 0; // the number of streams that have not passed the free of this block yet
  int64_t free_since = 0; // the pool's search count when this became free (garbage collection's age)
  std::vector<c10::Stream> stream_uses; // streams given to record_stream
  Context context; // the stack of the allocation

  bool is_split() const {
    return previous != nullptr || next != nullptr;
  }
  // Neither in use nor waiting for a stream: can be allocated or merged.
  bool is_free() const {
    return !allocated && !busy && events == 0 && stream_uses.empty();
  }
  bool is_active() const {
    return allocated || events > 0 || !stream_uses.empty();
  }
};

// A range of device memory, or of reserved address space (expandable). All its blocks belong to one stream and one
// pool. Segments are recycled but never deleted, so that SegmentMap can read them without a lock.
struct Segment {
  std::atomic<uint64_t> version{0}; // odd while address and size change
  std::atomic<char*> address{nullptr};
  std::atomic<size_t> size{0};

  std::atomic<DeviceCachingAllocator*> allocator{nullptr}; // nullptr: not in use
  BlockPool* pool = nullptr;
  FreeBlocks* free_blocks = nullptr; // of this pool and stream
  c10::StreamId stream = 0;
  Block* first = nullptr;
  size_t index = 0; // in the allocator's list
  size_t page = 0; // expandable: unit of mapping; otherwise 0
  bool uncached = false; // is returned to the device as soon as it is free
  std::optional<MemorySource> source; // where it comes from; nullopt: the device
  Context context; // the stack of its allocation

  // Allocated blocks by start address. Blocks have at least 512 bytes in the small pool and more than 1 MiB in the
  // large pool, so at most one block starts in each slot of that length.
  int slot_shift = 0;
  std::unique_ptr<Block*, decltype(&std::free)> slots{nullptr, &std::free};

  char* begin() const {
    return address.load(std::memory_order_relaxed);
  }
  size_t bytes() const {
    return size.load(std::memory_order_relaxed);
  }
  bool is_expandable() const {
    return page != 0;
  }
  bool contains(const void* pointer) const {
    auto p = reinterpret_cast<uintptr_t>(pointer);
    auto start = reinterpret_cast<uintptr_t>(begin());
    return p >= start && p - start < bytes();
  }
  Block*& slot(const void* pointer) {
    return slots.get()[(static_cast<const char*>(pointer) - begin()) >> slot_shift];
  }
};

} // namespace backplane
