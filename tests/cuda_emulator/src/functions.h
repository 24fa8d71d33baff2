// Limits of kernels.

#pragma once

constexpr int kRegisters = 32; // of a thread, as cuFuncGetAttribute says: kernels have none here
constexpr int kMostShared = 163 << 10; // bytes of a block
constexpr unsigned kMostThreads = 1024;
constexpr unsigned kDynamicBytes = 227 << 10; // in the image of a module, for dynamic shared memory; see kernel_table.h
