// Devices in host memory. Each has a memory limit, and in-order streams.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "devices/device.h"

namespace backplane {

// `memory_limit` in bytes; allocations beyond it fail, as on a device with that much memory.
std::unique_ptr<Device> make_host_device(DeviceProperties properties, size_t memory_limit);

// Makes the streams of host devices execute all commands in their own threads, as GPUs do, so that a missing wait
// becomes visible. `delays`: the seed of random delays; with it, some commands start up to 0.2 ms late. Must be called
// before the first host device is made.
void make_host_devices_asynchronous(std::optional<uint64_t> delays);
bool host_devices_are_asynchronous() noexcept;

} // namespace backplane
