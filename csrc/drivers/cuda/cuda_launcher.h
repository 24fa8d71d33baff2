// The launcher of the CUDA driver: the functions of a C launcher (docs/driver-contract.md) for each CUDA device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace backplane::cuda {

constexpr size_t kMostDevices = 16;

// The names of the functions of libcuda that make_launcher() needs.
std::vector<std::string> function_names();

// Returns the addresses of the launcher's functions by name.
// `functions`: the addresses of function_names(). `index`: less than kMostDevices; `device`: its CUdevice.
// Throws ValueError if a function is missing or the index is too large.
std::map<std::string, uintptr_t> make_launcher(
    const std::map<std::string, uintptr_t>& functions, size_t index, int device);

// Returns a CUresult and the primary context of a device of make_launcher(). The first call retains the context.
std::pair<int, uintptr_t> context(size_t index);

// Returns the name of the function of libcuda that has failed with a CUresult in a function of the launcher in this
// thread, and forgets it; "" if none has.
std::string take_failed_call(int status);

// Keeps a stream of the device busy with a host function. Returns a CUresult.
int sleep(size_t index, uintptr_t stream, double milliseconds);

} // namespace backplane::cuda
