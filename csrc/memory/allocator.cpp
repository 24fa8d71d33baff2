#include "memory/allocator.h"

#include "devices/device.h"
#include "devices/discovery.h"
#include "devices/interrupts.h"
#include "devices/recording.h"
#include "memory/allocator_config.h"
#include "memory/caching_allocator.h"
#include "memory/pinned.h"
#include "memory/segment_map.h"
#include "streams/capture.h"
#include "streams/stream.h"
#include "streams/submit.h"

#include <c10/core/impl/COW.h>
#include <c10/util/Exception.h>

#include <array>
#include <optional>
#include <utility>

namespace backplane {

namespace {

constexpr size_t kMaxDevices = 128; // c10::DeviceIndex is a signed byte

// Never destroyed: tensors can be freed while the process exits.
struct Allocators {
  std::array<std::atomic<DeviceCachingAllocator*>, kMaxDevices> by_device{};
  std::mutex mutex; // for creating an allocator
  std::atomic<bool> caching{true};
  std::optional<HistorySettings> history; // for allocators that are created later
};

Allocators& allocators() {
  static auto* instance = new Allocators();
  return *instance;
}

Allocators& all_allocators = allocators(); // avoids the check of a function-local static on the hot path

C10_NOINLINE DeviceCachingAllocator& make_device_allocator(c10::DeviceIndex index) {
  index = checked_index(index);
  auto fresh = std::make_unique<DeviceCachingAllocator>(index); // calls the device, so not under the mutex
  pin_for(device(index)); // likewise
  std::lock_guard<std::mutex> guard(all_allocators.mutex);
  auto& slot = all_allocators.by_device[index];
  if (slot == nullptr) {
    if (all_allocators.history.has_value()) {
      fresh->record_history(*all_allocators.history, /*clear=*/true);
    }
    slot = fresh.release();
  }
  return *slot;
}

// Called wherever a tensor is freed, also while the process exits and in forked children.
void delete_allocation(void* pointer) {
  if (pointer == nullptr || in_bad_fork()) {
    return; // the memory is the parent's, and a thread of the parent may have held the lock at the fork
  }
  if (C10_UNLIKELY(Recording::active() != nullptr)) {
    Recording::active()->freed(pointer);
  }
  try {
    raw_free(pointer);
  } catch (const std::exception& error) {
    if (!postpone_interrupt(error)) { // called by destructors, which cannot throw
      TORCH_WARN("error while freeing bp memory: ", error.what());
    }
  }
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return allocate_on(current_device(), bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &delete_allocation;
  }

  // Called by c10 before a write to copy-on-write memory.
  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    note_not_replayable("it writes to copy-on-write memory");
    const auto index = device_of_address(destination);
    const auto from = device_of_address(source);
    TORCH_CHECK(
        from < 0 || from == index, "memory of bp:", static_cast<int>(from),
        " cannot be copied to bp:", static_cast<int>(index), ": make bp:", static_cast<int>(from),
        " the current device");
    submit(current_stream(index), Copy{destination, source, bytes, CopyKind::WithinDevice});
  }

  bool initialized() override {
    return is_initialized() && !in_bad_fork();
  }

  void emptyCache(c10::MempoolId_t pool = {0, 0}) override {
    for_each_device_allocator([&](c10::DeviceIndex, DeviceCachingAllocator& one) { one.empty_cache(pool); });
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    // Memory from elsewhere (from_blob, DLPack) is managed by its owner.
    const bool shared_lazily = c10::impl::cow::is_cow_data_ptr(data);
    if (data.get() == nullptr || !(data.get_deleter() == &delete_allocation || shared_lazily)) {
      return;
    }
    TORCH_CHECK_VALUE(
        stream.device_type() == c10::kPrivateUse1, "record_stream expects a stream of a bp device, but got ", stream);
    void* pointer = shared_lazily ? data.get() : data.get_context(); // only memory of this allocator is copy-on-write
    Segment* segment = segment_map().find(pointer);
    TORCH_INTERNAL_ASSERT(segment != nullptr);
    segment->allocator.load()->record_stream(segment, pointer, stream);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    return device_allocator(index).stats();
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    device_allocator(index).reset_accumulated_stats();
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    device_allocator(index).reset_peak_stats();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Device& owner = device(index);
    DeviceCall call(owner);
    return owner.memory_info();
  }
};

Allocator& bp_allocator() {
  static auto* allocator = new Allocator();
  return *allocator;
}

// Allocates on one device, whatever device is current.
class OneDevice final : public c10::Allocator {
 public:
  explicit OneDevice(c10::DeviceIndex index) : index_(index) {}

  c10::DataPtr allocate(size_t bytes) override {
    return allocate_on(index_, bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &delete_allocation;
  }

  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    bp_allocator().copy_data(destination, source, bytes);
  }

 private:
  const c10::DeviceIndex index_;
};

template <size_t... I>
auto one_for_each_device(std::index_sequence<I...>) {
  return new std::array{OneDevice(static_cast<c10::DeviceIndex>(I))...};
}

struct Registration {
  Registration() {
    register_allocator_options();
    c10::SetAllocator(c10::kPrivateUse1, &bp_allocator());
  }
} registration;

} // namespace

c10::DeviceAllocator& caching_allocator() {
  return bp_allocator();
}

c10::Allocator& allocator_of(c10::DeviceIndex index) {
  static auto* all = one_for_each_device(std::make_index_sequence<kMaxDevices>()); // never destroyed, like their memory
  return (*all)[checked_index(index)];
}

DeviceCachingAllocator& device_allocator(c10::DeviceIndex index) {
  if (C10_LIKELY(index >= 0 && !in_bad_fork())) {
    if (auto* existing = all_allocators.by_device[index].load(std::memory_order_acquire)) {
      return *existing;
    }
  }
  return make_device_allocator(index);
}

void for_each_device_allocator(const std::function<void(c10::DeviceIndex, DeviceCachingAllocator&)>& visit) {
  if (in_bad_fork()) {
    return;
  }
  for (size_t index = 0; index < kMaxDevices; ++index) {
    if (auto* existing = all_allocators.by_device[index].load(std::memory_order_acquire)) {
      visit(static_cast<c10::DeviceIndex>(index), *existing);
    }
  }
}

c10::DataPtr allocate_on(c10::DeviceIndex index, size_t bytes) {
  constexpr size_t kExbibyte = size_t{1} << 60;
  TORCH_CHECK_WITH(OutOfMemoryError, bytes < kExbibyte, "bp out of memory. Tried to allocate more than 1EB memory.");
  if (bytes == 0) {
    return {nullptr, nullptr, &delete_allocation, c10::Device(c10::kPrivateUse1, checked_index(index))};
  }
  c10::Stream stream = current_stream(index);
  void* pointer =
      device_allocator(index).allocate(bytes, stream.id(), !all_allocators.caching.load(std::memory_order_relaxed));
  if (C10_UNLIKELY(Recording::active() != nullptr)) {
    Recording::active()->allocated(pointer, bytes);
  }
  return {pointer, pointer, &delete_allocation, stream.device()};
}

void* raw_allocate(c10::Stream stream, size_t bytes) {
  if (bytes == 0) {
    return nullptr;
  }
  stream_identity(stream); // throws for a stream that does not exist
  return device_allocator(stream.device_index())
      .allocate(bytes, stream.id(), !all_allocators.caching.load(std::memory_order_relaxed));
}

void raw_free(void* pointer) {
  Segment* segment = segment_map().find(pointer);
  DeviceCachingAllocator* owner = segment != nullptr ? segment->allocator.load(std::memory_order_relaxed) : nullptr;
  TORCH_CHECK(
      owner != nullptr, "invalid device pointer: ", pointer, " is not allocated on any bp device (freed twice?)");
  owner->free(segment, pointer);
}

c10::DeviceIndex device_of_address(const void* address) {
  Segment* segment = segment_map().find(address);
  DeviceCachingAllocator* owner = segment != nullptr ? segment->allocator.load(std::memory_order_relaxed) : nullptr;
  return owner != nullptr ? owner->index() : -1;
}

void enable_caching(bool enabled) {
  all_allocators.caching = enabled;
}

bool is_caching_enabled() {
  return all_allocators.caching;
}

void record_memory_history(const HistorySettings& settings, bool clear) {
  {
    std::lock_guard<std::mutex> guard(all_allocators.mutex);
    all_allocators.history = settings;
  }
  for_each_device_allocator(
      [&](c10::DeviceIndex, DeviceCachingAllocator& one) { one.record_history(settings, clear); });
}

} // namespace backplane
