#include "aten/kernel_capabilities.h"

#include <array>
#include <atomic>

#include "devices/device.h"

namespace backplane {
namespace {

std::array<std::atomic<bool>, 256> one_pass, threads; // by device

} // namespace

void set_kernel_capabilities(c10::DeviceIndex device, KernelCapabilities capabilities) {
  one_pass.at(device) = capabilities.attends_in_one_pass;
  threads.at(device) = capabilities.runs_threads;
}

bool attends_in_one_pass(c10::DeviceIndex device) {
  return one_pass.at(device);
}

bool runs_threads(c10::DeviceIndex device) {
  return threads.at(device);
}

bool computes_on_host(c10::DeviceIndex index) {
  return runs_threads(index) && device(index).host_sees_memory();
}

} // namespace backplane
