// The caching allocator of one device. Rules, statistics and names are CUDACachingAllocator's:
//
// - A request is rounded up to 512 bytes. Requests up to 1 MiB come from the small pool, whose segments are 2 MiB; larger
//   ones from the large pool, whose segments are 20 MiB or, from 10 MiB on, the request rounded up to 2 MiB.
// - The smallest free block of the pool and the stream that fits is taken, and split if enough remains. A freed block
//   merges with its free neighbours. Segments stay here until memory is short or the cache is emptied.
// - A block that other streams have used becomes free when they have passed the point at which it was freed.
//
// Locking: one mutex, and never a call of the device while it is held. Devices may run Python, which needs the GIL, and
// a thread with the GIL may be waiting for the mutex. So whatever calls the device gives up the lock meanwhile, and what
// was looked up before has to be looked up again.
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
  std::set<Block*, ByStreamAndAddress> unmapped; // parts of expandable segments without memory

  FreeBlocks& of(c10::StreamId stream);
};

// A pool of its own: torch.bp.MemPool, and graphs.
struct PrivatePool {
  explicit PrivatePool(c10::MempoolId_t id) : id(id) {}

  const c10::MempoolId_t id;
  int use_count = 0; // MemPool objects, graphs and use_mem_pool blocks; at 0 its cached segments may go
  int allocating = 0; // threads that are allocating from it right now with the lock released
  size_t segments = 0;
  bool use_on_oom = false; // serves others as a last resort before an out-of-memory error
  bool no_split = false;
  std::optional<MemorySource> source; // nothing: the device, or what all others have
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

// (device, bytes wanted, bytes allowed or in all, bytes free)
using OutOfMemoryObserver = std::function<void(c10::DeviceIndex, size_t, size_t, size_t)>;

class DeviceCachingAllocator {
 public:
  explicit DeviceCachingAllocator(c10::DeviceIndex index);

  c10::DeviceIndex index() const {
    return index_;
  }

  // `uncached`: a segment of its own, which is returned to the device when it is freed.
  void* allocate(size_t bytes, c10::StreamId stream, bool uncached);
  // Throws for an address that is not the start of an allocated block.
  void free(Segment* segment, void* pointer);
  void record_stream(Segment* segment, void* pointer, c10::Stream stream);
  // {start, bytes} of the segment around an allocated block.
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
  // Segments of the pool come from there from now on. Throws NotImplementedError where the device knows only its driver's
  // memory.
  void set_pool_source(c10::MempoolId_t id, MemorySource source);
  // The same of all others, which throws where the device has given memory already; and whether it would.
  void set_source(MemorySource source);
  void check_may_set_source();
  int pool_use_count(c10::MempoolId_t id);
  // From here to end_allocate_to_pool, requests for streams that pass the filter come from the pool.
  void begin_allocate_to_pool(c10::MempoolId_t id, std::function<bool(c10::StreamId)> filter);
  void end_allocate_to_pool(c10::MempoolId_t id);

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Request {
    size_t bytes; // as asked for
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
    bool without_event; // it waits until the stream has nothing to do
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
    DeviceCall call(device_); // taken after the lock is given up and released before it is taken again
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
  Segment* make_free(Block* block, const Context& context); // returns a segment that has to go back to the device
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
  void* take_memory(const std::optional<MemorySource>& source, size_t bytes, c10::StreamId stream);
  void return_memory(const std::optional<MemorySource>& source, void* memory, size_t bytes, c10::StreamId stream);
  void check_takes_any_memory() const;
  Segment* detach(Segment* segment, const Context& context);
  void give_back(Lock& lock, const std::vector<Segment*>& segments);
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
  std::vector<Segment*> unreturned_; // detached, and not given back yet: see give_back
  std::vector<Block*> spare_blocks_;
  uint32_t priority_ = 1;

  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::deque<PendingFree>> pending_;
  uint64_t pending_number_ = 0;
  std::map<c10::DeviceIndex, std::vector<Event*>> spare_events_; // by the device of the stream

  size_t reserved_ = 0; // what the device has handed out, including what is on its way
  std::optional<MemorySource> source_; // of all but pools that have their own
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
  Context gather(RecordContext level) const {
    return history_.wants(level) ? history_.gather() : nullptr;
  }
  static c10::MempoolId_t id_of(const BlockPool& pool) {
    return pool.owner != nullptr ? pool.owner->id : c10::MempoolId_t{0, 0};
  }
  // Applies to a statistic's total and to the part of it that is this pool's.
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
