// Limits of kernels, and occupancy.

#pragma once

#include <cstddef>

#include "cuda_api.h"

constexpr int kRegisters = 32; // of a thread, as cuFuncGetAttribute says: kernels have none here
constexpr int kMostShared = 163 << 10; // bytes of a block
constexpr unsigned kMostThreads = 1024;

// Stores how many blocks of a kernel a multiprocessor can hold at a time.
CUresult occupancy(int* blocks, const Function& function, int threads, size_t shared);
