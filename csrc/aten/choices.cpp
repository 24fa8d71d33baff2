#include "aten/choices.h"

#include <array>
#include <atomic>

#include "devices/device.h"

namespace backplane {
namespace {

std::array<std::atomic<bool>, 256> one_pass, threads; // by device

} // namespace

void set_choices(c10::DeviceIndex device, Choices choices) {
  one_pass.at(device) = choices.attends_in_one_pass;
  threads.at(device) = choices.runs_threads;
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
