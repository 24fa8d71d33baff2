// Binaries of NVIDIA's compiler. Their instructions are not executed: the program defines a host function for a kernel.

#pragma once

#include <cstdint>
#include <memory>

#include "cuda_api.h"

struct Module;

// Computes what a launch of a kernel computes, in stream order. `sizes`: grid, block, bytes of dynamic shared memory.
// `parameters`: the kernel's parameters, as they are in constant memory. The result is a CUresult.
using HostKernel = int (*)(const unsigned sizes[7], const char* parameters, uint64_t bytes);

// Whether an image in the format ELF is a binary of NVIDIA's compiler.
bool is_cubin(const void* image);

// Adds the kernels of a binary to a module. INVALID_IMAGE if it has a kernel without a host function.
CUresult load_cubin(const void* image, const std::shared_ptr<Module>& module);
