// The caching allocator of all devices: its c10 interface, and functions for the rest of the runtime.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <functional>

namespace backplane {

class DeviceCachingAllocator;
struct HistorySettings;

// The only instance; registered with c10 for PrivateUse1 when the module is loaded.
c10::DeviceAllocator& caching_allocator();

// The allocator of a device's storages: it allocates on that device, whatever device is current.
c10::Allocator& allocator_of(c10::DeviceIndex device);

// Allocates memory of `device` for its current stream, like caching_allocator().allocate() for the current device.
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes);

// The device whose allocator owns this address (anywhere inside a block), or -1.
c10::DeviceIndex device_of_address(const void* address);

// Memory without a DataPtr; nullptr for 0 bytes. `raw_free` throws if the pointer is not allocated.
void* raw_allocate(c10::Stream stream, size_t bytes);
void raw_free(void* pointer);

// The allocator of one device, created at first use. Throws if the index is out of range or in_bad_fork() is true.
DeviceCachingAllocator& device_allocator(c10::DeviceIndex index);
// A new pool id: (0, n) for a pool of the user, (n, 0) for a pool of a graph, as in torch.cuda.
c10::MempoolId_t new_pool_id(bool made_by_user);

// Visits the existing allocators.
void for_each_device_allocator(const std::function<void(c10::DeviceIndex, DeviceCachingAllocator&)>& visit);

// If false, every allocation gets a separate segment from the device (for memory checkers).
void enable_caching(bool enabled);
bool is_caching_enabled();

// Applies to all devices, including those whose allocator is created later.
void record_memory_history(const HistorySettings& settings, bool clear);

} // namespace backplane
