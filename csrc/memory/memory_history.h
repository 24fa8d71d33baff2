// The history of an allocator's actions, with stacks, as of torch.cuda.memory._record_memory_history.
#pragma once

#include "memory/allocator_blocks.h"

#include <c10/util/ApproximateClock.h>

#include <string>

namespace backplane {

enum class TraceAction {
  Alloc,
  FreeRequested,
  FreeCompleted,
  SegmentAlloc,
  SegmentFree,
  SegmentMap,
  SegmentUnmap,
  Snapshot,
  OutOfMemory,
  Count
};

// The names that snapshots and skip_actions use; throws ValueError for an unknown one.
const char* name_of(TraceAction action);
TraceAction trace_action(const std::string& name);

struct TraceEntry {
  TraceAction action;
  size_t address; // for OutOfMemory: the free bytes of the device
  size_t size;
  c10::StreamId stream;
  c10::MempoolId_t pool;
  c10::approx_time_t time;
  Context context;
  std::string metadata;
};

enum class RecordContext { Never, State, Alloc, All };

struct HistorySettings {
  bool enabled = false;
  RecordContext when = RecordContext::Never;
  Context (*gather)() = nullptr;
  size_t max_entries = 1;
  uint32_t skipped = 0; // bit i: TraceAction(i) is not recorded
};

// Guarded by the lock of its allocator, except for `wants` and `gather`.
class MemoryHistory {
 public:
  void configure(const HistorySettings& settings, bool clear);
  // True if `level` needs a context. Called before the lock is taken, because gathering can need the GIL.
  bool wants(RecordContext level) const {
    return when_.load(std::memory_order_relaxed) >= static_cast<int>(level);
  }
  Context gather() const {
    auto function = gather_.load(std::memory_order_acquire);
    return function != nullptr ? function() : nullptr;
  }
  bool enabled() const {
    return settings_.enabled;
  }
  void record(
      TraceAction action,
      const void* address,
      size_t size,
      c10::StreamId stream,
      c10::MempoolId_t pool,
      const Context& context);
  std::vector<TraceEntry> entries() const; // oldest first
  void set_metadata(std::string metadata) {
    metadata_ = std::move(metadata);
  }
  const std::string& metadata() const {
    return metadata_;
  }

 private:
  HistorySettings settings_;
  std::atomic<int> when_{0};
  std::atomic<Context (*)()> gather_{nullptr};
  std::vector<TraceEntry> ring_;
  size_t next_ = 0; // where the ring is overwritten once it is full
  std::string metadata_;
};

} // namespace backplane
