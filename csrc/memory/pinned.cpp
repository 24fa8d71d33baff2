// The allocator of pinned host memory: PyTorch's caching host allocator with page-aligned memory and bp events.
//
// Blocks are pinned for all devices that can pin (Device::can_pin) and are in use: when the block is created, or when
// the device is first used. No device is called while a lock is held, including PyTorch's locks. Therefore blocks that
// are no longer needed are freed by the next call of the allocator.
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

// The size of an allocation for `size` bytes.
size_t round_up_to_pages(size_t size) {
  return (size + kPage - 1) / kPage * kPage;
}

// A device, and the argument of its unpin().
using Pin = std::pair<Device*, void*>;

struct Range {
  size_t size;
  int being_pinned = 0; // the number of threads that are pinning it
  bool is_freed = false; // while it was being pinned
  std::vector<Pin> pins;
};

// The ranges that are currently pinned, by address.
struct PinnedRanges {
  using Place = std::map<uintptr_t, Range>::iterator;

  std::shared_mutex lock; // not held while a device is called
  std::map<uintptr_t, Range> known;
  std::vector<Device*> devices; // in use and able to pin
  std::vector<std::pair<void*, std::vector<Pin>>> pending; // memory to be freed
  std::atomic<bool> any_pending{false};

  // The caller holds the lock.
  void defer_free(Place place) {
    pending.emplace_back(reinterpret_cast<void*>(place->first), std::move(place->second.pins));
    known.erase(place);
    any_pending = true;
  }
  void free(uintptr_t address) {
    const Place place = known.find(address);
    if (place->second.being_pinned > 0) {
      place->second.is_freed = true;
    } else {
      defer_free(place);
    }
  }
};

PinnedRanges& pinned_ranges() {
  static auto* ranges = new PinnedRanges;
  return *ranges;
}

// Pins a range whose `being_pinned` counts the caller. The device's call can throw.
void pin(uintptr_t address, size_t size, Device& device) {
  void* handle = device.pin(reinterpret_cast<void*>(address), round_up_to_pages(size));
  PinnedRanges& ranges = pinned_ranges();
  const std::unique_lock<std::shared_mutex> guard(ranges.lock);
  ranges.known.at(address).pins.emplace_back(&device, handle);
}

// The caller has finished pinning the range.
void end_pinning(uintptr_t address) {
  PinnedRanges& ranges = pinned_ranges();
  const std::unique_lock<std::shared_mutex> guard(ranges.lock);
  const auto place = ranges.known.find(address);
  if (--place->second.being_pinned == 0 && place->second.is_freed) {
    ranges.defer_free(place);
  }
}

// Unpins and frees the memory in `pending`. The caller must not hold a lock.
void free_pending() {
  PinnedRanges& ranges = pinned_ranges();
  if (!ranges.any_pending.load(std::memory_order_acquire) || inside_driver_call()) {
    return;
  }
  std::vector<std::pair<void*, std::vector<Pin>>> pending;
  {
    const std::unique_lock<std::shared_mutex> guard(ranges.lock);
    pending.swap(ranges.pending);
    ranges.any_pending = false;
  }
  for (const auto& [memory, pins] : pending) {
    // While the process exits, pinned memory is kept. In a forked child the pins are the parent's, but not the memory.
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

// What a freed block waits for: an event or, without one, an idle stream. There is no event inside a driver call
// (driver_call.h), or if recording it failed: destructors free blocks, and cannot throw.
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
      TORCH_WARN("error while freeing pinned memory in use by ", stream, ": ", error.what());
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
    free_pending();
    return Base::allocate(size);
  }

  void free(void* context) override {
    Base::free(context);
    free_pending();
  }

  void empty_cache() override {
    Base::empty_cache();
    free_pending();
  }

 private:
  void allocate_host_memory(size_t size, void** address) override {
    *address = std::aligned_alloc(kPage, round_up_to_pages(size));
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
      free_pending();
      throw;
    }
    end_pinning(start);
  }

  void free_block(Block* block) override {
    stats_.host_free_time.increase(0);
    PinnedRanges& ranges = pinned_ranges(); // PyTorch holds its locks, so no device call here
    const std::unique_lock<std::shared_mutex> guard(ranges.lock);
    ranges.free(reinterpret_cast<uintptr_t>(block->ptr_));
  }

  void record_stream(std::optional<std::vector<OwnedEvent>>& events, c10::Stream stream) override {
    // The stream is the parent process's, or the process is exiting. Without an event the block is never reused, which
    // keeps pending transfers safe.
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
