// The allocator of pinned host memory: PyTorch's own caching host allocator over page-aligned memory and bp events.
//
// Its blocks are pinned for the devices that can do so (Device::can_pin) and that the process uses: those in use when a
// block is made, and others when they are first used. No device is called while a lock is held, be it PyTorch's: so a block
// that is no longer needed is freed a little later, by whoever calls the allocator next.
#include <ATen/core/CachingHostAllocator.h>
#include <Python.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "devices/driver_call.h"
#include "memory/pinned.h"
#include "streams/stream.h"

namespace backplane {
namespace {

constexpr size_t kPage = 4096;

// Of what is allocated for so many bytes.
size_t whole_pages(size_t size) {
  return (size + kPage - 1) / kPage * kPage;
}

// What unpin() of a device gets.
using Pin = std::pair<Device*, void*>;

struct Range {
  size_t size;
  int being_pinned = 0; // by so many threads
  bool is_freed = false; // meanwhile
  std::vector<Pin> pins;
};

// The ranges that are pinned now, by their addresses.
struct PinnedRanges {
  using Place = std::map<uintptr_t, Range>::iterator;

  std::shared_mutex lock; // not held while a device is called
  std::map<uintptr_t, Range> known;
  std::vector<Device*> devices; // that pin and are used
  std::vector<std::pair<void*, std::vector<Pin>>> leaving; // memory that is no longer needed
  std::atomic<bool> any_leaving{false};

  // Under the lock.
  void leave(Place place) {
    leaving.emplace_back(reinterpret_cast<void*>(place->first), std::move(place->second.pins));
    known.erase(place);
    any_leaving = true;
  }
  void free(uintptr_t address) {
    const Place place = known.find(address);
    if (place->second.being_pinned > 0) {
      place->second.is_freed = true;
    } else {
      leave(place);
    }
  }
};

PinnedRanges& pinned_ranges() {
  static auto* ranges = new PinnedRanges;
  return *ranges;
}

// Takes the device's call, which may throw, of a range whose `being_pinned` counts the caller.
void pin(uintptr_t address, size_t size, Device& device) {
  void* handle = device.pin(reinterpret_cast<void*>(address), whole_pages(size));
  PinnedRanges& ranges = pinned_ranges();
  const std::unique_lock<std::shared_mutex> guard(ranges.lock);
  ranges.known.at(address).pins.emplace_back(&device, handle);
}

// The caller does no longer pin the range.
void end_pinning(uintptr_t address) {
  PinnedRanges& ranges = pinned_ranges();
  const std::unique_lock<std::shared_mutex> guard(ranges.lock);
  const auto place = ranges.known.find(address);
  if (--place->second.being_pinned == 0 && place->second.is_freed) {
    ranges.leave(place);
  }
}

// Gives back what is no longer needed. The caller holds no lock.
void free_leaving() {
  PinnedRanges& ranges = pinned_ranges();
  if (!ranges.any_leaving.load(std::memory_order_acquire) || inside_driver_call()) {
    return;
  }
  std::vector<std::pair<void*, std::vector<Pin>>> leaving;
  {
    const std::unique_lock<std::shared_mutex> guard(ranges.lock);
    leaving.swap(ranges.leaving);
    ranges.any_leaving = false;
  }
  for (const auto& [memory, pins] : leaving) {
    // What is pinned stays, with its memory, where the process is ending; in a forked child it is the parent's.
    const bool is_ending = !Py_IsInitialized() &&
        std::any_of(pins.begin(), pins.end(), [](const Pin& one) { return one.first->needs_gil(); });
    if (is_ending) {
      continue;
    }
    for (const auto& [device, handle] : pins) {
      if (!in_bad_fork()) {
        device->unpin(handle);
      }
    }
    std::free(memory);
  }
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
  using Base = at::CachingHostAllocatorImpl<c10::Stream, OwnedEvent>;

  std::pair<void*, void*> allocate(size_t size) override {
    free_leaving();
    return Base::allocate(size);
  }

  void free(void* context) override {
    Base::free(context);
    free_leaving();
  }

  void empty_cache() override {
    Base::empty_cache();
    free_leaving();
  }

 private:
  void allocate_host_memory(size_t size, void** address) override {
    *address = std::aligned_alloc(kPage, whole_pages(size));
    TORCH_CHECK_WITH(OutOfMemoryError, *address != nullptr, "cannot allocate ", size, " bytes of pinned host memory");
    stats_.host_alloc_time.increase(0);
    const auto start = reinterpret_cast<uintptr_t>(*address);
    PinnedRanges& ranges = pinned_ranges();
    std::vector<Device*> devices;
    {
      const std::unique_lock<std::shared_mutex> guard(ranges.lock);
      ranges.known[start] = {size, /*being_pinned=*/1};
      if (!in_bad_fork()) {
        devices = ranges.devices;
      }
    }
    try {
      for (Device* device : devices) {
        if (!device->is_lost()) {
          pin(start, size, *device);
        }
      }
    } catch (...) {
      {
        const std::unique_lock<std::shared_mutex> guard(ranges.lock);
        ranges.free(start);
      }
      end_pinning(start);
      free_leaving();
      throw;
    }
    end_pinning(start);
  }

  void free_block(Block* block) override {
    stats_.host_free_time.increase(0);
    PinnedRanges& ranges = pinned_ranges(); // PyTorch holds locks of its own: see the top
    const std::unique_lock<std::shared_mutex> guard(ranges.lock);
    ranges.free(reinterpret_cast<uintptr_t>(block->ptr_));
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

PinnedAllocator& pinned_instance() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

void free_pinned(void* context) {
  pinned_instance().free(context);
}

} // namespace

at::HostAllocator& pinned_allocator() {
  return pinned_instance();
}

void pin_for(Device& device) {
  if (!device.can_pin()) {
    return;
  }
  PinnedRanges& ranges = pinned_ranges();
  std::vector<std::pair<uintptr_t, size_t>> older;
  {
    const std::unique_lock<std::shared_mutex> guard(ranges.lock);
    if (std::find(ranges.devices.begin(), ranges.devices.end(), &device) != ranges.devices.end()) {
      return;
    }
    ranges.devices.push_back(&device);
    for (auto& [address, range] : ranges.known) {
      ++range.being_pinned;
      older.emplace_back(address, range.size);
    }
  }
  std::exception_ptr failure;
  std::string refused;
  for (const auto& [address, size] : older) {
    try {
      if (failure == nullptr) {
        pin(address, size, device);
      }
    } catch (const c10::OutOfMemoryError& error) {
      refused = error.what_without_backtrace();
    } catch (...) {
      failure = std::current_exception();
    }
    end_pinning(address);
  }
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
  if (!refused.empty()) {
    TORCH_WARN(
        "host memory that was pinned before ", device.properties().name, " was used is not pinned for it: ", refused);
  }
}

bool is_pinned(const void* address) {
  PinnedRanges& ranges = pinned_ranges();
  std::shared_lock<std::shared_mutex> guard(ranges.lock);
  const auto value = reinterpret_cast<uintptr_t>(address);
  auto after = ranges.known.upper_bound(value);
  if (after == ranges.known.begin()) {
    return false;
  }
  --after;
  return value < after->first + after->second.size;
}

} // namespace backplane
