// VkFFT's Fourier transforms, as routines of the family fft (torch_backplane.drivers.libraries).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace backplane {

// For each dtype's name the address of the function. `functions` are addresses of pyvkfft's (make_config, init_app, fft,
// ifft, free_app, free_config) and of OpenCL's (clGetCommandQueueInfo, clGetDeviceInfo, clCreateBuffer, clCreateSubBuffer,
// clEnqueueCopyBuffer, clReleaseMemObject); `dimensions` is what pyvkfft's vkfft_max_fft_dimensions() answers. Throws where
// one is missing. Called once: they are kept for good.
std::map<std::string, uintptr_t> vkfft_transforms(
    const std::map<std::string, uintptr_t>& functions, size_t dimensions);

// VkFFT builds kernels for each size, batch and queue: an application of its. How many there are, and may be; beyond that,
// those go that were not used for the longest time.
size_t vkfft_applications();
size_t vkfft_most_applications();
void vkfft_limit_applications(size_t most);

} // namespace backplane
