// A device whose calls fail when they are told to: for tests of what the runtime, and programs, make of that.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "devices/device.h"

namespace backplane {

// What a call that fails does. `OutOfMemory` is for calls that allocate, which say so by what they return.
enum class FaultKind : uint8_t { Error, OutOfMemory, Loss };

// Devices that are added from now on can be told to fail; others cost nothing. To be called before they are found.
void prepare_faults();
bool faults_are_prepared();
std::unique_ptr<Device> make_faulty(std::unique_ptr<Device> inner);

// The names of the calls that can fail, which are methods of Device.
const std::vector<std::string>& fault_names();

// The nth call from now of this name fails, of any device. Throws ValueError for a name or a kind that there is not.
void fail_call(const std::string& name, uint64_t nth, FaultKind kind);
// Each call of these names fails with this probability, as the seed has it.
void fail_by_chance(const std::vector<std::string>& names, double probability, uint64_t seed);
// Each call takes so much longer.
void slow_calls(double milliseconds);
// None fails any more, and none is slow. A device that is lost stays lost.
void clear_faults();

// How often each was called since the last time that this was asked with `reset`, and how many failed on purpose.
struct FaultCounts {
  std::map<std::string, uint64_t> calls;
  uint64_t failed = 0;
};
FaultCounts fault_counts(bool reset);

} // namespace backplane
