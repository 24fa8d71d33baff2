// What the runtime must know of a device that runs kernels to choose a way before a planner is asked. Python tells it when the
// device is discovered (torch_backplane/operators/kernel_capabilities.py).
#pragma once

#include <c10/core/Device.h>

namespace backplane {

struct KernelCapabilities {
  bool attends_in_one_pass = false; // by kernels (torch_backplane/operators/attention.py)
  bool runs_threads = false; // work items are a processor's: where the host sees the memory, its libraries are at least as good
};

void set_kernel_capabilities(c10::DeviceIndex device, KernelCapabilities capabilities);
bool attends_in_one_pass(c10::DeviceIndex device);
bool runs_threads(c10::DeviceIndex device);
// Whether the host computes on the device's memory what it has better libraries for. Not of devices without kernels.
bool computes_on_host(c10::DeviceIndex device);

} // namespace backplane
