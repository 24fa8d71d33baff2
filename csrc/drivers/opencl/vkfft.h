// VkFFT's Fourier transforms, as routines of the family fft (torch_backplane.drivers.libraries).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace backplane {

// Returns the address of the routine for each dtype name. `functions`: the addresses of functions of pyvkfft
// (make_config, init_app, fft, ifft, free_app, free_config) and of OpenCL (clGetCommandQueueInfo, clGetDeviceInfo,
// clCreateBuffer, clCreateSubBuffer, clEnqueueCopyBuffer, clReleaseMemObject). `dimensions`: the result of pyvkfft's
// vkfft_max_fft_dimensions(). Throws ValueError if a function is missing. To be called once: the addresses are kept in
// a global variable.
std::map<std::string, uintptr_t> vkfft_transforms(const std::map<std::string, uintptr_t>& functions, size_t dimensions);

// The cache of VkFFT applications: the kernels that VkFFT builds for each size, batch and queue. The number of cached
// applications, and its limit. The least recently used ones are evicted.
size_t vkfft_applications();
size_t vkfft_max_applications();
void vkfft_limit_applications(size_t most);

} // namespace backplane
