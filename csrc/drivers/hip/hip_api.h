// The functions of HIP that hip_functions.cpp adapts, with the types of hip_runtime_api.h (versions 6 and 7) that they
// use. As in cuda_api.h, handles are void*, and the Python driver passes the addresses.
#pragma once

#include <cstddef>

namespace backplane::hip {

// hipError_t, with the numbers of CUresult.
constexpr int kInvalidContext = 201;
constexpr int kDeviceToDevice = 3, kDefault = 4; // hipMemcpyKind

struct KernelNodeParams { // hipKernelNodeParams
  unsigned block[3];
  void** extra;
  void* function;
  unsigned grid[3];
  void** arguments;
  unsigned shared_memory;
};

struct MemsetParams { // hipMemsetParams
  void* destination;
  unsigned element_size;
  size_t height, pitch;
  unsigned value;
  size_t width;
};

// clang-format off
#define BACKPLANE_HIP_FUNCTIONS(FUNCTION) \
  FUNCTION(hipGetDevice, (int* device)) \
  FUNCTION(hipSetDevice, (int device)) \
  FUNCTION(hipStreamGetDevice, (void* stream, int* device)) \
  FUNCTION(hipDeviceEnablePeerAccess, (int peer, unsigned flags)) \
  FUNCTION(hipModuleLaunchKernel, ( \
    void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
    unsigned block_z, unsigned shared_memory, void* stream, void** arguments, void** extra)) \
  FUNCTION(hipModuleLaunchCooperativeKernel, ( \
    void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
    unsigned block_z, unsigned shared_memory, void* stream, void** arguments)) \
  FUNCTION(hipMemcpyAsync, (void* to, const void* from, size_t bytes, int kind, void* stream)) \
  FUNCTION(hipGraphAddKernelNode, ( \
    void** node, void* graph, void* const* after, size_t count, const KernelNodeParams* params)) \
  FUNCTION(hipGraphAddMemcpyNode1D, ( \
    void** node, void* graph, void* const* after, size_t count, void* to, const void* from, size_t bytes, int kind)) \
  FUNCTION(hipGraphAddMemsetNode, ( \
    void** node, void* graph, void* const* after, size_t count, const MemsetParams* params)) \
  FUNCTION(hipGraphExecKernelNodeSetParams, (void* executable, void* node, const KernelNodeParams* params)) \
  FUNCTION(hipGraphExecMemcpyNodeSetParams1D, ( \
    void* executable, void* node, void* to, const void* from, size_t bytes, int kind)) \
  FUNCTION(hipGraphExecMemsetNodeSetParams, (void* executable, void* node, const MemsetParams* params))
// clang-format on

struct Api {
#define BACKPLANE_HIP_MEMBER(name, parameters) int(*name) parameters = nullptr;
  BACKPLANE_HIP_FUNCTIONS(BACKPLANE_HIP_MEMBER)
#undef BACKPLANE_HIP_MEMBER
};

} // namespace backplane::hip
