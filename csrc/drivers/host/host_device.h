// Devices in host memory: each has a memory limit of its own and real, in-order streams.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "devices/device.h"

namespace backplane {

// `memory_limit` in bytes; allocations beyond it fail as they would on a card of that size.
std::unique_ptr<Device> make_host_device(DeviceProperties properties, size_t memory_limit);

// From now on the streams of host devices do everything in threads of their own, as GPUs do, so that a program that lacks a wait
// goes wrong here too. With `delays`, some of the work begins up to 0.2 ms late, as this seed has it. To be called before
// the first of them is made.
void make_host_devices_asynchronous(std::optional<uint64_t> delays);
bool host_devices_are_asynchronous() noexcept;

} // namespace backplane
