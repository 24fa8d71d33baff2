// cuFFT's Fourier transforms, as routines of the family fft (torch_backplane.drivers.libraries).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace backplane::cuda {

// The names of the functions of cuFFT that cufft_transforms() needs.
std::vector<std::string> cufft_functions();

// Returns the address of the routine for each dtype name, for a device of make_launcher(). The routines return a
// cufftResult, or a CUresult as a negative number.
// `functions`: the addresses of cufft_functions(), the same in every call, because they are kept in a global variable.
// Throws ValueError if a function is missing.
std::map<std::string, uintptr_t> cufft_transforms(const std::map<std::string, uintptr_t>& functions, size_t index);

// Returns the status of a routine and the bytes of workspace that it needs. Makes the plan if it is not cached.
// `dtype`: a name in cufft_transforms(). `sizes`: outer, middle, inner.
std::pair<int, size_t> cufft_workspace(
    size_t index, const std::string& dtype, int64_t kind, int64_t batch, const std::vector<int64_t>& sizes);

// The cache of cuFFT's plans of a device. Evicted plans are destroyed when the device does not use them any more.
size_t cufft_plans(size_t index);
size_t cufft_max_plans(size_t index);
void cufft_limit_plans(size_t index, size_t most);

} // namespace backplane::cuda
