// CUDA_EMULATOR_CHECKS: the memory that a launch can access.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kernel_launch.h"
#include "launch.h"

// Whether CUDA_EMULATOR_CHECKS is set.
bool checks_kernels();

// Whether launches with findings continue, and succeed.
bool continues_after_findings();

// Returns the blocks to which the pointer parameters of a launch lead: begin, end. A program that divides allocations
// into blocks tells them with emulator_resolve_bounds.
std::vector<std::pair<uint64_t, uint64_t>> known_blocks(const KernelLaunch& launch);

// Returns allocations, or the known blocks of those that have some, and variables of the module, by address.
std::vector<KernelRange> memory_of(const KernelLaunch& launch);
