// The functions of CUDA's driver API that the launcher calls, with the types of cuda.h that they use. Handles are
// void*, device addresses are integers. The runtime is not linked with libcuda: the Python driver passes the addresses.
#pragma once

#include <cstddef>
#include <cstdint>

namespace backplane::cuda {

// CUresult.
constexpr int kInvalidValue = 1, kNotReady = 600, kNotSupported = 801, kGraphUpdateFailure = 910;

constexpr unsigned kDisableTiming = 2, kInterprocess = 4; // CUevent_flags
constexpr unsigned kLazyPeerAccess = 1; // CUipcMem_flags
constexpr int kMaxDynamicSharedMemory = 8; // CUfunction_attribute
constexpr int kCooperative = 2, kClusterDimension = 4; // CUlaunchAttributeID
constexpr int kDeviceMemory = 2; // CUmemorytype

struct IpcHandle { // CUipcMemHandle, CUipcEventHandle
  char bytes[64];
};

struct LaunchAttribute { // CUlaunchAttribute
  int id;
  char pad[4];
  union {
    char size[64];
    int cooperative;
    unsigned cluster[3];
  } value;
};

struct LaunchConfig { // CUlaunchConfig
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_memory;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct KernelNodeParams { // CUDA_KERNEL_NODE_PARAMS_v2
  void* function;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_memory;
  void** arguments;
  void** extra;
  void* kernel;
  void* context;
};

struct CopySide {
  size_t x, y, z, level;
  int memory_type;
  void* host;
  uint64_t device;
  void* array;
  void* reserved;
  size_t pitch, height;
};

struct CopyNodeParams { // CUDA_MEMCPY3D
  CopySide source, destination;
  size_t width, height, depth;
};

struct FillNodeParams { // CUDA_MEMSET_NODE_PARAMS
  uint64_t destination;
  size_t pitch;
  unsigned value;
  unsigned element_size;
  size_t width, height;
};

struct HostNodeParams { // CUDA_HOST_NODE_PARAMS
  void (*function)(void*);
  void* argument;
};

// Calls `function(name, parameters)` for each function. The names have the suffixes of libcuda's symbols.
#define BACKPLANE_CUDA_FUNCTIONS(function)                                                                              \
  function(cuDevicePrimaryCtxRetain, (void** context, int device)) function(                                            \
      cuCtxGetCurrent,                                                                                                  \
      (void** context)) function(cuCtxPushCurrent_v2, (void* context)) function(cuCtxPopCurrent_v2, (void** context))   \
      function(cuStreamGetCtx, (void* stream, void** context)) function(                                                \
          cuLaunchKernel,                                                                                               \
          (void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,         \
           unsigned block_z, unsigned shared_memory, void* stream, void** arguments, void** extra))                     \
          function(cuLaunchKernelEx, (const LaunchConfig* config, void* kernel, void** arguments, void** extra))        \
              function(cuFuncSetAttribute, (void* kernel, int attribute, int value)) function(                          \
                  cuMemcpyAsync, (uint64_t to, uint64_t from, size_t bytes, void* stream))                              \
                  function(cuMemcpyDtoDAsync_v2, (uint64_t to, uint64_t from, size_t bytes, void* stream)) function(    \
                      cuMemcpyHtoDAsync_v2, (uint64_t to, const void* from, size_t bytes, void* stream))                \
                      function(cuMemcpyDtoHAsync_v2, (void* to, uint64_t from, size_t bytes, void* stream)) function(   \
                          cuMemsetD8Async, (uint64_t to, unsigned char value, size_t bytes, void* stream))              \
                          function(cuEventCreate, (void** event, unsigned flags)) function(                             \
                              cuEventDestroy_v2, (void* event)) function(cuEventRecord, (void* event, void* stream))    \
                              function(cuStreamWaitEvent, (void* stream, void* event, unsigned flags)) function(        \
                                  cuEventQuery, (void* event)) function(cuEventSynchronize, (void* event))              \
                                  function(cuEventElapsedTime, (float* milliseconds, void* start, void* end)) function( \
                                      cuLaunchHostFunc, (void* stream, void (*host_function)(void*), void* argument))   \
                                      function(cuIpcGetMemHandle, (IpcHandle * handle, uint64_t memory)) function(      \
                                          cuIpcOpenMemHandle_v2, (uint64_t* memory, IpcHandle handle, unsigned flags))  \
                                          function(cuIpcCloseMemHandle, (uint64_t memory)) function(                    \
                                              cuIpcGetEventHandle, (IpcHandle * handle, void* event))                   \
                                              function(cuIpcOpenEventHandle, (void** event, IpcHandle handle))          \
                                                  function(cuGraphCreate, (void** graph, unsigned flags))               \
                                                      function(cuGraphDestroy, (void* graph)) function(                 \
                                                          cuGraphAddKernelNode_v2,                                      \
                                                          (void** node, void* graph, void* const* after, size_t count,  \
                                                           const KernelNodeParams* params))                             \
                                                          function(                                                     \
                                                              cuGraphAddMemcpyNode,                                     \
                                                              (void** node, void* graph, void* const* after,            \
                                                               size_t count, const CopyNodeParams* params,              \
                                                               void* context))                                          \
                                                              function(                                                 \
                                                                  cuGraphAddMemsetNode,                                 \
                                                                  (void** node, void* graph, void* const* after,        \
                                                                   size_t count, const FillNodeParams* params,          \
                                                                   void* context))                                      \
                                                                  function(                                             \
                                                                      cuGraphAddHostNode,                               \
                                                                      (void** node, void* graph, void* const* after,    \
                                                                       size_t count, const HostNodeParams* params))     \
                                                                      function(                                         \
                                                                          cuGraphInstantiateWithFlags,                  \
                                                                          (void** executable, void* graph,              \
                                                                           unsigned long long flags))                   \
                                                                          function(                                     \
                                                                              cuGraphExecKernelNodeSetParams_v2,        \
                                                                              (void* executable, void* node,            \
                                                                               const KernelNodeParams* params))         \
                                                                              function(                                 \
                                                                                  cuGraphExecMemcpyNodeSetParams,       \
                                                                                  (void* executable, void* node,        \
                                                                                   const CopyNodeParams* params,        \
                                                                                   void* context))                      \
                                                                                  function(                             \
                                                                                      cuGraphExecMemsetNodeSetParams,   \
                                                                                      (void* executable, void* node,    \
                                                                                       const FillNodeParams* params,    \
                                                                                       void* context))                  \
                                                                                      function(                         \
                                                                                          cuGraphLaunch,                \
                                                                                          (void* executable,            \
                                                                                           void* stream))               \
                                                                                          function(                     \
                                                                                              cuGraphExecDestroy,       \
                                                                                              (void* executable))

struct Api {
#define BACKPLANE_CUDA_MEMBER(name, parameters) int(*name) parameters = nullptr;
  BACKPLANE_CUDA_FUNCTIONS(BACKPLANE_CUDA_MEMBER)
#undef BACKPLANE_CUDA_MEMBER
};

// The loaded functions; set before the first launch (cuda_launcher.h).
extern Api api;

} // namespace backplane::cuda
