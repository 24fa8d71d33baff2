// Facts about a device's kernels on which the runtime decides before a planner runs. Python sets them when the device
// is discovered (torch_backplane/operators/kernel_capabilities.py).
#pragma once

#include <c10/core/Device.h>

namespace backplane {

struct KernelCapabilities {
  bool attends_in_one_pass = false; // has one-pass attention kernels (torch_backplane/operators/attention.py)
  // Work items do not run in lockstep: the device is a CPU. If the host can access its memory, the host's libraries are
  // at least as fast as kernels.
  bool runs_threads = false;
};

void set_kernel_capabilities(c10::DeviceIndex device, KernelCapabilities capabilities);
bool attends_in_one_pass(c10::DeviceIndex device);
bool runs_threads(c10::DeviceIndex device);
// Whether the host runs its libraries on the device's memory where they are faster. False for devices without kernels.
bool computes_on_host(c10::DeviceIndex device);

} // namespace backplane
