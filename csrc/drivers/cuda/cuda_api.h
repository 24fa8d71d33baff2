// The functions of CUDA's driver API that the launcher calls, with the types of cuda.h that they use. Handles are
// void*, device addresses are integers. The runtime is not linked with libcuda: the Python driver passes the addresses.
#pragma once

#include <c10/macros/Macros.h>

#include <cstddef>
#include <cstdint>

namespace backplane::cuda {

// CUresult.
constexpr int kInvalidValue = 1, kNotReady = 600, kNotSupported = 801, kGraphUpdateFailure = 910;

constexpr unsigned kDisableTiming = 2, kInterprocess = 4; // CUevent_flags
constexpr unsigned kNonBlocking = 1; // CUstream_flags
constexpr unsigned kLazyPeerAccess = 1; // CUipcMem_flags
constexpr int kCooperative = 2, kClusterDimension = 4; // CUlaunchAttributeID
constexpr int kDeviceMemory = 2; // CUmemorytype
constexpr int kCaptureOfThread = 1, kCaptureRelaxed = 2; // CUstreamCaptureMode
constexpr int kCaptureNone = 0, kCaptureActive = 1; // CUstreamCaptureStatus
constexpr unsigned kNoDestructorSync = 1; // CUuserObject_flags
constexpr unsigned kMoveUserObject = 1; // CUuserObjectRetain_flags

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

// Calls FUNCTION(name, parameters) for each function. The names have the suffixes of libcuda's symbols.
// clang-format off
#define BACKPLANE_CUDA_FUNCTIONS(FUNCTION) \
  FUNCTION(cuDevicePrimaryCtxRetain, (void** context, int device)) \
  FUNCTION(cuCtxGetCurrent, (void** context)) \
  FUNCTION(cuCtxPushCurrent_v2, (void* context)) \
  FUNCTION(cuCtxPopCurrent_v2, (void** context)) \
  FUNCTION(cuCtxSynchronize, ()) \
  FUNCTION(cuStreamCreate, (void** stream, unsigned flags)) \
  FUNCTION(cuStreamDestroy_v2, (void* stream)) \
  FUNCTION(cuStreamGetCtx, (void* stream, void** context)) \
  FUNCTION(cuStreamBeginCapture_v2, (void* stream, int mode)) \
  FUNCTION(cuStreamEndCapture, (void* stream, void** graph)) \
  FUNCTION(cuStreamGetCaptureInfo_v2, ( \
    void* stream, int* status, uint64_t* id, void** graph, void* const** nodes, size_t* count)) \
  FUNCTION(cuThreadExchangeStreamCaptureMode, (int* mode)) \
  FUNCTION(cuLaunchKernel, ( \
    void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
    unsigned block_z, unsigned shared_memory, void* stream, void** arguments, void** extra)) \
  FUNCTION(cuLaunchKernelEx, (const LaunchConfig* config, void* kernel, void** arguments, void** extra)) \
  FUNCTION(cuMemcpyAsync, (uint64_t to, uint64_t from, size_t bytes, void* stream)) \
  FUNCTION(cuMemcpyDtoDAsync_v2, (uint64_t to, uint64_t from, size_t bytes, void* stream)) \
  FUNCTION(cuMemcpyHtoDAsync_v2, (uint64_t to, const void* from, size_t bytes, void* stream)) \
  FUNCTION(cuMemcpyDtoHAsync_v2, (void* to, uint64_t from, size_t bytes, void* stream)) \
  FUNCTION(cuMemsetD8Async, (uint64_t to, unsigned char value, size_t bytes, void* stream)) \
  FUNCTION(cuEventCreate, (void** event, unsigned flags)) \
  FUNCTION(cuEventDestroy_v2, (void* event)) \
  FUNCTION(cuEventRecord, (void* event, void* stream)) \
  FUNCTION(cuStreamWaitEvent, (void* stream, void* event, unsigned flags)) \
  FUNCTION(cuEventQuery, (void* event)) \
  FUNCTION(cuEventSynchronize, (void* event)) \
  FUNCTION(cuEventElapsedTime, (float* milliseconds, void* start, void* end)) \
  FUNCTION(cuLaunchHostFunc, (void* stream, void (*host_function)(void*), void* argument)) \
  FUNCTION(cuIpcGetMemHandle, (IpcHandle* handle, uint64_t memory)) \
  FUNCTION(cuIpcOpenMemHandle_v2, (uint64_t* memory, IpcHandle handle, unsigned flags)) \
  FUNCTION(cuIpcCloseMemHandle, (uint64_t memory)) \
  FUNCTION(cuIpcGetEventHandle, (IpcHandle* handle, void* event)) \
  FUNCTION(cuIpcOpenEventHandle, (void** event, IpcHandle handle)) \
  FUNCTION(cuGraphCreate, (void** graph, unsigned flags)) \
  FUNCTION(cuGraphDestroy, (void* graph)) \
  FUNCTION(cuGraphAddKernelNode_v2, ( \
    void** node, void* graph, void* const* after, size_t count, const KernelNodeParams* params)) \
  FUNCTION(cuGraphAddMemcpyNode, ( \
    void** node, void* graph, void* const* after, size_t count, const CopyNodeParams* params, void* context)) \
  FUNCTION(cuGraphAddMemsetNode, ( \
    void** node, void* graph, void* const* after, size_t count, const FillNodeParams* params, void* context)) \
  FUNCTION(cuGraphAddHostNode, ( \
    void** node, void* graph, void* const* after, size_t count, const HostNodeParams* params)) \
  FUNCTION(cuGraphAddChildGraphNode, (void** node, void* graph, void* const* after, size_t count, void* child)) \
  FUNCTION(cuGraphInstantiateWithFlags, (void** executable, void* graph, unsigned long long flags)) \
  FUNCTION(cuGraphExecKernelNodeSetParams_v2, (void* executable, void* node, const KernelNodeParams* params)) \
  FUNCTION(cuGraphExecMemcpyNodeSetParams, ( \
    void* executable, void* node, const CopyNodeParams* params, void* context)) \
  FUNCTION(cuGraphExecMemsetNodeSetParams, ( \
    void* executable, void* node, const FillNodeParams* params, void* context)) \
  FUNCTION(cuGraphExecChildGraphNodeSetParams, (void* executable, void* node, void* child)) \
  FUNCTION(cuUserObjectCreate, ( \
    void** object, void* given, void (*destroy)(void*), unsigned references, unsigned flags)) \
  FUNCTION(cuUserObjectRelease, (void* object, unsigned references)) \
  FUNCTION(cuGraphRetainUserObject, (void* graph, void* object, unsigned references, unsigned flags)) \
  FUNCTION(cuGraphLaunch, (void* executable, void* stream)) \
  FUNCTION(cuGraphExecDestroy, (void* executable))
// clang-format on

// Remembers a call that has failed in this thread, for messages.
void note_failure(const char* name, int status);

// A function of libcuda. Calls that fail are remembered.
template <typename Signature>
class Function;

template <typename... Parameters>
class Function<int(Parameters...)> {
 public:
  Function() = default;
  Function(const char* name, int (*function)(Parameters...)) : name_(name), function_(function) {}

  int operator()(Parameters... given) const {
    const int status = function_(given...);
    if (C10_UNLIKELY(status != 0)) {
      note_failure(name_, status);
    }
    return status;
  }

 private:
  const char* name_ = nullptr;
  int (*function_)(Parameters...) = nullptr;
};

struct Api {
#define BACKPLANE_CUDA_MEMBER(name, parameters) Function<int parameters> name;
  BACKPLANE_CUDA_FUNCTIONS(BACKPLANE_CUDA_MEMBER)
#undef BACKPLANE_CUDA_MEMBER
};

// The loaded functions; set before the first launch (cuda_launcher.h).
extern Api api;

} // namespace backplane::cuda
