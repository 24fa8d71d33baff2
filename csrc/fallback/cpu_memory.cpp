#include "fallback/cpu_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "devices/device.h"
#include "memory/allocator.h"
#include "streams/stream.h"

namespace backplane {
namespace {

thread_local c10::DeviceIndex scope_device = -1;

c10::Allocator* wrapped = nullptr; // PyTorch's CPU allocator

void release(void* address) {
  auto& owner = device_of_address(address) >= 0 ? static_cast<c10::Allocator&>(caching_allocator()) : *wrapped;
  owner.raw_deallocate(address);
}

// A block that the stream has freed may still be in use by commands that other threads submitted after the kernel
// started. These commands were submitted before the block was freed, so waiting for the stream now is enough.
void wait_for_earlier_uses(c10::DeviceIndex index) {
  device(index).synchronize_stream(stream_handle(current_stream(index)));
}

struct ScopedCpuAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (C10_LIKELY(scope_device < 0)) {
      return wrapped->allocate(bytes);
    }
    c10::DataPtr pointer = allocate_on(scope_device, bytes);
    wait_for_earlier_uses(scope_device);
    pointer.unsafe_set_device(c10::Device(c10::kCPU));
    return pointer;
  }

  bool is_simple_data_ptr(const c10::DataPtr& pointer) const override {
    return wrapped->is_simple_data_ptr(pointer);
  }

  // Raw allocations (oneDNN uses some) do not store a deleter, so `release` finds the owner by address.
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }
};

struct Registration {
  Registration() {
    constexpr uint8_t kPriority = 1; // higher than PyTorch's CPU allocator, which has 0
    wrapped = c10::GetCPUAllocator();
    c10::SetCPUAllocator(new ScopedCpuAllocator, kPriority);
  }
} registration;

} // namespace

CpuMemoryScope::CpuMemoryScope(c10::DeviceIndex index) : previous_(scope_device) {
  scope_device = index;
}

CpuMemoryScope::~CpuMemoryScope() {
  scope_device = previous_;
}

bool is_bp_memory(const c10::StorageImpl& storage) {
  return storage.data_ptr().get_deleter() == caching_allocator().raw_deleter();
}

} // namespace backplane
