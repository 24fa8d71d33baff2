// Fault injection: a device whose calls fail on request, to test how the runtime and programs handle failures.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "devices/device.h"

namespace backplane {

// How a call fails. `OutOfMemory` applies to calls that allocate, which report it by their return value.
enum class FaultKind : uint8_t { Error, OutOfMemory, Loss };

// Enables faults for devices that are added afterwards. Must be called before discovery. Without it they cost nothing.
void prepare_faults();
bool faults_are_prepared();
std::unique_ptr<Device> make_faulty(std::unique_ptr<Device> inner);

// The calls that can fail: methods of Device, and a Python driver's methods for the kinds of commands.
const std::vector<std::string>& fault_names();

// Makes the nth call of this name from now fail, counted over all devices. Throws ValueError for invalid arguments.
void fail_call(const std::string& name, uint64_t nth, FaultKind kind);
// Makes each call of these names fail with this probability, drawn from a generator with this seed.
void fail_by_chance(const std::vector<std::string>& names, double probability, uint64_t seed);
// Delays each call by `milliseconds`.
void slow_calls(double milliseconds);
// Removes all faults and delays. A lost device stays lost.
void clear_faults();

// The number of calls of each name, and of injected failures, since the last fault_counts(/*reset=*/true).
struct FaultCounts {
  std::map<std::string, uint64_t> calls;
  uint64_t failed = 0;
};
FaultCounts fault_counts(bool reset);

} // namespace backplane
