// Counts of calls, and injected faults. libcuda and libnvrtc have their own.

#include "faults.h"

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

struct Fault {
  long remaining; // calls before it
  int error;
};

struct Calls {
  std::mutex mutex;
  std::map<std::string, long> counts;
  std::multimap<std::string, Fault> faults;
};

// CUDA_EMULATOR_FAULTS=cuMemAlloc:1:2,cuLaunchKernel:3:719: the first cuMemAlloc fails with error 2, …
void read_faults(Calls& calls) {
  const char* setting = getenv("CUDA_EMULATOR_FAULTS");
  std::istringstream items(setting == nullptr ? "" : setting);
  for (std::string item; std::getline(items, item, ',');) {
    const size_t first = item.find(':'), second = item.find(':', first + 1);
    if (second == std::string::npos) {
      fprintf(stderr, "CUDA_EMULATOR_FAULTS: «%s» is not CALL:NUMBER:ERROR\n", item.c_str());
      abort();
    }
    const long number = std::stol(item.substr(first + 1)), error = std::stol(item.substr(second + 1));
    calls.faults.emplace(item.substr(0, first), Fault{number - 1, static_cast<int>(error)});
  }
}

Calls& calls() {
  static Calls& all = *[] {
    auto* made = new Calls;
    read_faults(*made);
    return made;
  }();
  return all;
}

// The name without the suffix of its version: cuMemAlloc for cuMemAlloc_v2.
std::string plain(const char* name) {
  const char* end = strstr(name, "_v");
  return end == nullptr ? name : std::string(name, end);
}

} // namespace

int fault_of(const char* name) {
  Calls& all = calls();
  std::lock_guard lock(all.mutex);
  const std::string key = plain(name);
  ++all.counts[key];
  const auto [begin, end] = all.faults.equal_range(key);
  int error = 0;
  for (auto at = begin; at != end;) { // each fault counts this call
    const bool is_due = at->second.remaining-- == 0;
    error = is_due ? at->second.error : error;
    at = is_due ? all.faults.erase(at) : std::next(at);
  }
  return error;
}

// --- for tests -------------------------------------------------------------------------------------------------------

// Makes the n-th call from now (1: the next one) fail with an error. n = 0 removes the faults of the call.
EXPORTED void emulator_inject_fault(const char* name, long number, int error) {
  std::lock_guard lock(calls().mutex);
  if (number == 0) {
    calls().faults.erase(plain(name));
    return;
  }
  calls().faults.emplace(plain(name), Fault{number - 1, error});
}

// Stores the names of all functions called so far, each with the number of its calls, one per line. Returns the length
// of the whole text; a text that does not fit is cut off.
EXPORTED size_t emulator_calls(char* text, size_t size) {
  std::ostringstream all;
  {
    std::lock_guard lock(calls().mutex);
    for (const auto& [name, count] : calls().counts) {
      all << name << ' ' << count << '\n';
    }
  }
  const std::string made = all.str();
  if (size != 0) {
    text[made.copy(text, size - 1)] = '\0';
  }
  return made.size();
}
