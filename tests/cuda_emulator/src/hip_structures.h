// Parameters of HIP's graph nodes, and those of CUDA's for them.

#pragma once

#include "cuda_api.h"

using IpcHandle = CUipcHandle;

struct HipKernelNode { // hipKernelNodeParams
  unsigned block[3];
  void** extra;
  void* function;
  unsigned grid[3];
  void** arguments;
  unsigned shared;
};

struct HipFill { // hipMemsetParams
  CUdeviceptr to;
  unsigned element_size;
  size_t height, pitch;
  unsigned value;
  size_t width;
};

inline CUDA_KERNEL_NODE_PARAMS cuda_node(const HipKernelNode& given) {
  return {
      static_cast<CUfunction>(given.function), given.grid[0], given.grid[1], given.grid[2], given.block[0],
      given.block[1], given.block[2], given.shared, given.arguments, given.extra, nullptr, nullptr};
}

inline CUDA_MEMSET_NODE_PARAMS cuda_node(const HipFill& given) {
  return {given.to, given.pitch, given.value, given.element_size, given.width, given.height};
}

inline CUDA_MEMCPY3D cuda_copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  CUDA_MEMCPY3D made{};
  made.srcMemoryType = made.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  made.srcDevice = from;
  made.dstDevice = to;
  made.srcPitch = made.dstPitch = made.WidthInBytes = bytes;
  made.srcHeight = made.dstHeight = made.Height = made.Depth = 1;
  return made;
}
