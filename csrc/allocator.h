// The caching allocator of all devices: c10's view of it, and what the rest of the socket needs.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

namespace backplane {

// The one instance; registered with c10 for PrivateUse1 when the module is loaded.
c10::DeviceAllocator& caching_allocator();

// Memory of `device` for its current stream, as caching_allocator().allocate() gives for the current device.
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes);

// The device whose allocator owns this address (anywhere inside a block), or -1.
c10::DeviceIndex device_of_address(const void* address);

} // namespace backplane
