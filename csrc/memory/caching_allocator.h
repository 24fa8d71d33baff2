// The caching allocator of one device. Rules, statistics and names are those of CUDACachingAllocator:
//
// - Requests are rounded up to a multiple of 512 bytes. Requests up to 1 MiB use the small pool, whose segments have
//   2 MiB. Larger requests use the large pool, whose segments have 20 MiB (large_segment_size_mb) or, for requests
//   from 10 MiB on, the size of the request rounded up to a multiple of 2 MiB.
// - The smallest fitting free block of the pool and the stream is used, and split if enough remains. A freed block
//   merges with its free neighbours. Segments stay cached until memory is short or the cache is emptied.
// - A block that other streams have used becomes free when they have passed the point at which it was freed.
//
// Locking: there is one mutex, which is never held while the device is called. Devices can run Python, which needs the
// GIL, and a thread with the GIL can be waiting for the mutex. Code that calls the device releases the mutex meanwhile,
// and must repeat earlier lookups afterwards.
#pragma once

#include "devices/device.h"
#include "memory/allocator_blocks.h"
#include "memory/free_blocks.h"
#include "memory/memory_history.h"
#include "streams/stream.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>

namespace backplane {

struct PrivatePool;

struct BlockPool {
  BlockPool(bool small, PrivatePool* owner) : small(small), owner(owner) {}

  const bool small;
  PrivatePool* const owner; // nullptr: the device's own pools
  std::vector<std::unique_ptr<FreeBlocks>> free_blocks; // by stream id
  int64_t searches = 0; // counted while garbage collection is on: the clock for the age of free blocks

  struct ByStreamAndAddress {
    bool operator()(const Block* a, const Block* b) const {
      return a->segment->stream != b->segment->stream ? a->segment->stream < b->segment->stream
                                                      : a->address < b->address;
    }
  };
  std::set<Block*, ByStreamAndAddress> unmapped; // unmapped parts of expandable segments

  FreeBlocks& of(c10::StreamId stream);
};

// A private pool, of a torch.bp.MemPool or a graph.
struct PrivatePool {
  explicit PrivatePool(c10::MempoolId_t id) : id(id) {}

  const c10::MempoolId_t id;
  int use_count = 0; // MemPool objects, graphs and use_mem_pool blocks; at 0, cached segments can be released
  int allocating = 0; // threads that are allocating from it with the lock released
  size_t segments = 0;
  bool use_on_oom = false; // other pools use it before an out-of-memory error
  bool no_split = false;
  std::optional<MemorySource> source; // nullopt: the allocator's source_
  BlockPool small{true, this};
  BlockPool large{false, this};
};

struct BlockInfo {
  size_t address;
  size_t size;
  size_t requested;
  bool allocated;
  bool active;
  Context context;
};

struct SegmentInfo {
  size_t address = 0;
  size_t total_size = 0;
  size_t allocated_size = 0;
  size_t active_size = 0;
  size_t requested_size = 0;
  c10::StreamId stream = 0;
  bool large = false;
  bool expandable = false;
  c10::MempoolId_t pool{0, 0};
  Context context;
  std::vector<BlockInfo> blocks;
};

// (device, requested bytes, allowed or total bytes, free bytes)
using OutOfMemoryObserver = std::function<void(c10::DeviceIndex, size_t, size_t, size_t)>;

class DeviceCachingAllocator {
 public:
  explicit DeviceCachingAllocator(c10::DeviceIndex index);

  c10::DeviceIndex index() const {
    return index_;
  }

  // `uncached`: use a separate segment, which is returned to the device when it is freed.
  void* allocate(size_t bytes, c10::StreamId stream, bool uncached);
  // Throws for an address that is not the start of an allocated block.
  void free(Segment* segment, void* pointer);
  void record_stream(Segment* segment, void* pointer, c10::Stream stream);
  // {start, bytes} of the segment that contains an allocated block.
  std::pair<void*, size_t> base_allocation(Segment* segment, void* pointer);

  void empty_cache(c10::MempoolId_t pool);
  void set_memory_fraction(double fraction);
  double memory_fraction();

  c10::CachingDeviceAllocator::DeviceStats stats();
  void reset_accumulated_stats();
  void reset_peak_stats();

  // `pool`: only its segments; {0, 0}: all.
  std::vector<SegmentInfo> snapshot(c10::MempoolId_t pool);
  std::vector<TraceEntry> trace();
  Context allocation_context(Segment* segment, void* pointer);
  void record_history(const HistorySettings& settings, bool clear);
  bool history_enabled();
  void set_metadata(const std::string& metadata);
  void attach_out_of_memory_observer(OutOfMemoryObserver observer);

  void create_or_retain_pool(c10::MempoolId_t id);
  void release_pool(c10::MempoolId_t id);
  void set_pool_options(c10::MempoolId_t id, bool use_on_oom, bool no_split);
  // Sets the source of the pool's future segments. Throws NotImplementedError if the device accepts only memory of its
  // driver.
  void set_pool_source(c10::MempoolId_t id, MemorySource source);
  // The same for all other pools. Throws, too, if the device has already allocated memory. check_may_set_source() only
  // checks.
  void set_source(MemorySource source);
  void check_may_set_source();
  int pool_use_count(c10::MempoolId_t id);
  // Until end_allocate_to_pool, the pool serves the requests for streams that pass the filter.
  void begin_allocate_to_pool(c10::MempoolId_t id, std::function<bool(c10::StreamId)> filter);
  void end_allocate_to_pool(c10::MempoolId_t id);

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Request {
    size_t bytes; // as requested
    size_t size; // of the block
    size_t segment_size; // of a new segment, if one is needed
    c10::StreamId stream;
    BlockPool* pool;
    bool uncached;
    Context context;
  };

  struct PendingFree {
    Event* event;
    Block* block;
    uint64_t number;
    bool without_event; // waits until the stream is idle
  };

  // Calls the device with the lock released.
  template <typename Function>
  auto outside(Lock& lock, Function&& function) {
    struct Unlocked {
      explicit Unlocked(Lock& held) : held(held) {
        held.unlock();
      }
      ~Unlocked() {
        held.lock();
      }
      Lock& held;
    } unlocked(lock);
    DeviceCall call(device_); // created after the lock is released, destroyed before it is reacquired
    return function();
  }

  // caching_allocator.cpp
  Request make_request(size_t bytes, c10::StreamId stream, bool uncached, Context context);
  BlockPool& pool_for(size_t size, c10::StreamId stream);
  Block* find_free(const Request& request, bool count);
  Block* find_or_obtain(Lock& lock, Request& request);
  void* hand_out(const Request& request, Block* block);
  bool should_split(const Block* block, size_t size) const;
  Block* allocated_block(Segment* segment, void* pointer) const;
  Segment* make_free(Block* block, const Context& context); // returns a segment to give back, or nullptr
  Block* merge_if_free(Block* block, Block* neighbour, int64_t* merged_bytes);
  void insert_free(Block* block);
  Block* new_block(Segment* segment, char* address, size_t size);
  void recycle(Block* block);
  [[noreturn]] void out_of_memory(Lock& lock, const Request& request);

  // caching_allocator_streams.cpp
  void free_after_streams(Lock& lock, Block* block, const Context& context);
  void process_events(Lock& lock, const Context& context);
  void synchronize_events(Lock& lock, const Context& context);
  void complete(Lock& lock, c10::Stream stream, uint64_t number, const Context& context);

  // caching_allocator_segments.cpp
  Block* obtain_segment(Lock& lock, Request& request, bool retry);
  Segment* new_segment(const Request& request, char* address, size_t size, size_t page);
  std::optional<MemorySource> source_of(const BlockPool& pool) const;
  void check_has_not_allocated() const;
  void* take_memory(const std::optional<MemorySource>& source, size_t bytes, c10::StreamId stream);
  void return_memory(const std::optional<MemorySource>& source, void* memory, size_t bytes, c10::StreamId stream);
  void check_takes_any_memory() const;
  Segment* detach(Segment* segment, const Context& context);
  void give_back(Lock& lock, const std::vector<Segment*>& more, std::exception_ptr failure = nullptr);
  void collect_garbage(Lock& lock, const Context& context);
  bool release_oversize(Lock& lock, const Request& request);
  bool release_cached(Lock& lock, c10::MempoolId_t pool, const Context& context);
  Block* take_from_last_resort(const Request& request);

  // caching_allocator_expandable.cpp
  Block* expand(Lock& lock, Request& request);
  Block* find_room(const Request& request) const;
  Segment* reserve_segment(Lock& lock, const Request& request);
  void unmap_free_pages(Lock& lock, const std::function<bool(const BlockPool&)>& selected, const Context& context);
  void unmap(char* page, size_t bytes, std::exception_ptr& failure);
  Segment* return_unmapped(Block* block, const Context& context);

  const c10::DeviceIndex index_;
  Device& device_;
  std::mutex mutex_;

  BlockPool small_{true, nullptr};
  BlockPool large_{false, nullptr};
  std::map<c10::MempoolId_t, std::unique_ptr<PrivatePool>> private_pools_;
  std::vector<std::pair<c10::MempoolId_t, std::function<bool(c10::StreamId)>>> active_pools_;

  std::vector<Segment*> segments_;
  std::vector<Segment*> spare_segments_;
  std::vector<Segment*> unreturned_; // detached, not given back yet: see give_back
  std::vector<Block*> spare_blocks_;
  uint32_t priority_ = 1;

  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::deque<PendingFree>> pending_;
  uint64_t pending_number_ = 0;
  std::map<c10::DeviceIndex, std::vector<Event*>> spare_events_; // by the device of the stream

  size_t reserved_ = 0; // bytes from the device, including allocations in progress
  std::optional<MemorySource> source_; // of all pools without a source; nullopt: the device
  bool has_allocated_ = false; // segments or pages, since the process started
  std::optional<double> fraction_;
  size_t total_memory_ = 0; // of the device
  bool can_reserve_ = false;
  bool warned_about_expandable_ = false;
  c10::CachingDeviceAllocator::DeviceStats stats_;
  MemoryHistory history_;
  std::vector<OutOfMemoryObserver> observers_;

  size_t allowed() const {
    return static_cast<size_t>(fraction_.value_or(1.0) * static_cast<double>(total_memory_));
  }
  bool expandable() const;
  bool exceeds_device(const Request& request) const;
  Context gather(RecordContext level) const {
    return history_.wants(level) ? history_.gather() : nullptr;
  }
  static c10::MempoolId_t id_of(const BlockPool& pool) {
    return pool.owner != nullptr ? pool.owner->id : c10::MempoolId_t{0, 0};
  }
  // Changes a statistic's total and its part for small or large pools.
  template <typename Change>
  void change(c10::CachingAllocator::StatArray& stat, const BlockPool& pool, Change&& by) {
    using c10::CachingAllocator::StatType;
    by(stat[static_cast<size_t>(StatType::AGGREGATE)]);
    by(stat[static_cast<size_t>(pool.small ? StatType::SMALL_POOL : StatType::LARGE_POOL)]);
  }
  void increase(c10::CachingAllocator::StatArray& stat, const BlockPool& pool, size_t amount) {
    change(stat, pool, [&](auto& one) { one.increase(amount); });
  }
  void decrease(c10::CachingAllocator::StatArray& stat, const BlockPool& pool, size_t amount) {
    change(stat, pool, [&](auto& one) { one.decrease(amount); });
  }
  void increase_reserved(const BlockPool& pool, size_t amount);
  void decrease_reserved(const BlockPool& pool, size_t amount);
};

} // namespace backplane
