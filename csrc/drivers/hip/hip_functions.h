// Functions of HIP with the parameters of CUDA's driver API, for the launcher of the CUDA driver (drivers/cuda/).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace backplane::hip {

// The names of the functions of libamdhip64 that adapt() needs.
std::vector<std::string> adapted_names();

// Returns the addresses of functions that differ from CUDA's by more than their name, by CUDA's name without a version.
// HIP has no contexts, but a current device in each thread: a context here is the number of a device plus 1.
// `functions`: the addresses of adapted_names(). Throws ValueError if one is missing.
std::map<std::string, uintptr_t> adapt(const std::map<std::string, uintptr_t>& functions);

} // namespace backplane::hip
