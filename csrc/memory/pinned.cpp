// The allocator of pinned host memory: PyTorch's own caching host allocator over page-aligned memory and bp events.
#include <ATen/core/CachingHostAllocator.h>
#include <Python.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <map>
#include <shared_mutex>

#include "devices/device.h"
#include "devices/driver_call.h"
#include "memory/pinned.h"
#include "streams/stream.h"

namespace backplane {
namespace {

constexpr size_t kPage = 4096;

// The ranges that are pinned now, for is_pinned of any address inside.
struct PinnedRanges {
  std::shared_mutex lock;
  std::map<uintptr_t, size_t> sizes;
};

PinnedRanges& pinned_ranges() {
  static auto* ranges = new PinnedRanges;
  return *ranges;
}

// What a freed block waits for: an event, or where there is none, that the stream has nothing to do. There is none where
// recording it failed, since a block is freed by destructors, and inside a call of a driver (driver_call.h says why).
struct OwnedEvent {
  c10::Stream stream;
  std::unique_ptr<Event, void (*)(Event*)> event{nullptr, [](Event* owned) { destroy_event(owned); }};
  bool without_event = true;

  explicit OwnedEvent(c10::Stream recorded_on) : stream(recorded_on) {
    if (inside_driver_call()) {
      return;
    }
    try {
      event.reset(record_event_unless_lost(nullptr, stream));
      without_event = false;
    } catch (const std::exception& error) {
      TORCH_WARN("pinned memory that ", stream, " uses was freed, and meanwhile: ", error.what());
    }
  }

  bool is_past() const {
    return without_event ? device(stream.device_index()).is_lost() || query_stream(stream)
                         : backplane::is_past(event.get());
  }
};

using Block = at::HostBlock<c10::Stream>;

struct PinnedAllocatorImpl final : at::CachingHostAllocatorImpl<c10::Stream, OwnedEvent> {
 private:
  void allocate_host_memory(size_t size, void** address) override {
    *address = std::aligned_alloc(kPage, (size + kPage - 1) / kPage * kPage);
    TORCH_CHECK_WITH(OutOfMemoryError, *address != nullptr, "cannot allocate ", size, " bytes of pinned host memory");
    stats_.host_alloc_time.increase(0);
    PinnedRanges& ranges = pinned_ranges();
    std::unique_lock<std::shared_mutex> guard(ranges.lock);
    ranges.sizes[reinterpret_cast<uintptr_t>(*address)] = size;
  }

  void free_block(Block* block) override {
    {
      PinnedRanges& ranges = pinned_ranges();
      std::unique_lock<std::shared_mutex> guard(ranges.lock);
      ranges.sizes.erase(reinterpret_cast<uintptr_t>(block->ptr_));
    }
    stats_.host_free_time.increase(0);
    std::free(block->ptr_);
  }

  void record_stream(std::optional<std::vector<OwnedEvent>>& events, c10::Stream stream) override {
    // Without an event the block is never used again, which is what a transfer under way needs: where the stream is the
    // parent process's, and where the process is ending.
    if (in_bad_fork() || (device(stream.device_index()).needs_gil() && !Py_IsInitialized())) {
      return;
    }
    events->emplace_back(stream);
  }

  bool query_event(OwnedEvent& event) override {
    return event.is_past();
  }

  c10::Stream get_current_stream() const override {
    return current_stream(-1);
  }

  bool stream_is_capturing(c10::Stream) const override {
    return false;
  }
};

void free_pinned(void* context);

struct PinnedAllocator final : at::CachingHostAllocatorInterface<PinnedAllocatorImpl, free_pinned> {};

PinnedAllocator& instance() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

void free_pinned(void* context) {
  instance().free(context);
}

} // namespace

at::HostAllocator& pinned_allocator() {
  return instance();
}

bool is_pinned(const void* address) {
  PinnedRanges& ranges = pinned_ranges();
  std::shared_lock<std::shared_mutex> guard(ranges.lock);
  const auto value = reinterpret_cast<uintptr_t>(address);
  auto after = ranges.sizes.upper_bound(value);
  if (after == ranges.sizes.begin()) {
    return false;
  }
  --after;
  return value < after->first + after->second;
}

} // namespace backplane
