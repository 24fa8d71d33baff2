// The caching allocator of all devices: c10's view of it, and what the rest of the runtime needs.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <functional>

namespace backplane {

class DeviceCachingAllocator;
struct HistorySettings;

// The one instance; registered with c10 for PrivateUse1 when the module is loaded.
c10::DeviceAllocator& caching_allocator();

// What storages of one device have for their allocator: it allocates there, whatever device is current.
c10::Allocator& allocator_of(c10::DeviceIndex device);

// Memory of `device` for its current stream, as caching_allocator().allocate() gives for the current device.
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes);

// The device whose allocator owns this address (anywhere inside a block), or -1.
c10::DeviceIndex device_of_address(const void* address);

// Memory without a DataPtr; nullptr for 0 bytes. `raw_free` throws for anything else than what is allocated.
void* raw_allocate(c10::Stream stream, size_t bytes);
void raw_free(void* pointer);

// The allocator of one device, made at first use. Throws for an index out of range, and after a fork.
DeviceCachingAllocator& device_allocator(c10::DeviceIndex index);
// An id that no pool has had: (0, n) of a pool that a user makes, (n, 0) of one that a graph does, as torch.cuda's.
c10::MempoolId_t new_pool_id(bool made_by_user);

// Visits the allocators that exist already.
void for_each_device_allocator(const std::function<void(c10::DeviceIndex, DeviceCachingAllocator&)>& visit);

// False: every allocation gets memory of its own from the device (for memory checkers).
void enable_caching(bool enabled);
bool is_caching_enabled();

// Of all devices, also of those whose allocator is yet to be made.
void record_memory_history(const HistorySettings& settings, bool clear);

} // namespace backplane
