// libamdhip64: HIP's functions, by those of the emulated libcuda. Where HIP's numbers and structures differ from CUDA's,
// they are those of hip_runtime_api.h, versions 6 and 7.

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "faults.h"
#include "hip_structures.h"

#define API extern "C" __attribute__((visibility("default"))) int

using Handle = void*;
using Address = uint64_t;

constexpr int kInvalidValue = 1, kInvalidDevice = 101, kWarpSize = 87, kName = 256, kArchitecture = 1160;
constexpr int kMajor = 23, kMinor = 61;

extern "C" {
int cuInit(unsigned);
int cuDeviceGetCount(int*);
int cuDeviceGetName(char*, int, int);
int cuDeviceGetAttribute(int*, int, int);
int cuDevicePrimaryCtxRetain(Handle*, int);
int cuCtxGetCurrent(Handle*);
int cuCtxSetCurrent(Handle);
int cuCtxPushCurrent_v2(Handle);
int cuCtxPopCurrent_v2(Handle*);
int cuCtxGetDevice(int*);
int cuCtxEnablePeerAccess(Handle, unsigned);
int cuStreamGetCtx(Handle, Handle*);
int cuGetErrorName(int, const char**);
int cuGetErrorString(int, const char**);
int cuMemcpyAsync(Address, Address, size_t, Handle);
int cuLaunchCooperativeKernel(
    Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**);
int cuGraphAddKernelNode_v2(Handle*, Handle, const Handle*, size_t, const void*);
int cuGraphExecKernelNodeSetParams_v2(Handle, Handle, const void*);
int cuGraphAddMemcpyNode(Handle*, Handle, const Handle*, size_t, const void*, Handle);
int cuGraphExecMemcpyNodeSetParams(Handle, Handle, const void*, Handle);
int cuGraphAddMemsetNode(Handle*, Handle, const Handle*, size_t, const void*, Handle);
int cuGraphExecMemsetNodeSetParams(Handle, Handle, const void*, Handle);
}

namespace {

#define RETURN_STATUS(call)         \
  if (const int status_ = (call)) { \
    return status_;                 \
  }

thread_local int current_device = 0; // each thread begins with device 0

// The primary context of a device.
int context_of(int device, Handle* context) {
  static std::mutex mutex;
  static auto& all = *new std::map<int, Handle>;
  const std::lock_guard lock(mutex);
  Handle& known = all[device];
  if (known == nullptr) {
    RETURN_STATUS(cuDevicePrimaryCtxRetain(&known, device));
  }
  *context = known;
  return 0;
}

// HIP initializes itself, and has a current device in place of a context.
int enter(const char* name) {
  RETURN_STATUS(fault_of(name));
  return cuInit(0);
}

int enter_context(const char* name) {
  RETURN_STATUS(enter(name));
  Handle context = nullptr, now = nullptr;
  RETURN_STATUS(context_of(current_device, &context));
  RETURN_STATUS(cuCtxGetCurrent(&now));
  return now == context ? 0 : cuCtxSetCurrent(context);
}

// CUDA_ERROR_OUT_OF_MEMORY: hipErrorOutOfMemory.
std::string hip_name(const std::string& name) {
  std::string made = "hip";
  bool begins = true;
  for (const char one : name.substr(std::min(name.find('_') + 1, name.size()))) {
    if (one == '_') {
      begins = true;
    } else {
      made += begins ? one : static_cast<char>(std::tolower(one));
      begins = false;
    }
  }
  return made;
}

const char* kept(const std::string& text) {
  static std::mutex mutex;
  static auto& all = *new std::map<std::string, std::string>;
  const std::lock_guard lock(mutex);
  return all.emplace(text, text).first->second.c_str();
}

} // namespace

// A function that has the same parameters in CUDA.
#define SAME(hip, cuda, parameters, arguments) \
  extern "C" int cuda parameters;              \
  API hip parameters {                         \
    RETURN_STATUS(enter_context(__func__));    \
    return cuda arguments;                     \
  }

// --- devices

API hipInit(unsigned flags) {
  RETURN_STATUS(fault_of(__func__));
  return cuInit(flags);
}

API hipRuntimeGetVersion(int* version) {
  RETURN_STATUS(fault_of(__func__));
  const char* setting = getenv("HIP_EMULATOR_VERSION");
  *version = setting == nullptr ? 60300000 : atoi(setting);
  return 0;
}

API hipGetDeviceCount(int* count) {
  RETURN_STATUS(enter(__func__));
  return cuDeviceGetCount(count);
}

API hipGetDevice(int* device) {
  RETURN_STATUS(enter(__func__));
  *device = current_device;
  return 0;
}

API hipSetDevice(int device) {
  RETURN_STATUS(enter(__func__));
  int count = 0;
  RETURN_STATUS(cuDeviceGetCount(&count));
  if (device < 0 || device >= count) {
    return kInvalidDevice;
  }
  current_device = device;
  return 0;
}

API hipDeviceGetName(char* name, int size, int device) {
  RETURN_STATUS(enter(__func__));
  RETURN_STATUS(cuDeviceGetName(name, size, device));
  snprintf(name, static_cast<size_t>(size), "Emulated HIP device %d", device);
  return 0;
}

API hipDeviceGetAttribute(int* value, int attribute, int device) {
  RETURN_STATUS(enter(__func__));
  static const std::map<int, int> numbers{
      {6, 20}, {19, 38}, {56, 1}, {63, 16}, {74, 8}, {kWarpSize, 10}, {89, 102}, {kMajor, 75}, {kMinor, 76}};
  const auto found = numbers.find(attribute);
  if (value == nullptr || found == numbers.end()) {
    return kInvalidValue;
  }
  RETURN_STATUS(cuDeviceGetAttribute(value, found->second, device));
  *value = attribute == kMajor ? 11 : attribute == kMinor ? 0 : *value;
  return 0;
}

// The name and the architecture of the 1,472 bytes of hipDeviceProp_t.
API hipGetDevicePropertiesR0600(char* properties, int device) {
  RETURN_STATUS(enter(__func__));
  memset(properties, 0, 1472);
  RETURN_STATUS(hipDeviceGetName(properties, kName, device));
  strcpy(properties + kArchitecture, "gfx1100");
  return 0;
}

API hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  RETURN_STATUS(enter_context(__func__));
  Handle context = nullptr;
  RETURN_STATUS(context_of(peer, &context));
  return cuCtxEnablePeerAccess(context, flags);
}

extern "C" __attribute__((visibility("default"))) const char* hipGetErrorName(int error) {
  const char* text = nullptr;
  return cuGetErrorName(error, &text) == 0 ? kept(hip_name(text)) : "hipErrorUnknown";
}

extern "C" __attribute__((visibility("default"))) const char* hipGetErrorString(int error) {
  const char* text = nullptr;
  return cuGetErrorString(error, &text) == 0 ? text : "unknown error";
}

SAME(hipDeviceGet, cuDeviceGet, (int* device, int ordinal), (device, ordinal))
SAME(hipDeviceGetPCIBusId, cuDeviceGetPCIBusId, (char* name, int size, int device), (name, size, device))
SAME(hipDeviceTotalMem, cuDeviceTotalMem_v2, (size_t * bytes, int device), (bytes, device))
SAME(hipDeviceCanAccessPeer, cuDeviceCanAccessPeer, (int* can, int device, int peer), (can, device, peer))
SAME(hipDeviceSynchronize, cuCtxSynchronize, (), ())
SAME(hipDeviceGetStreamPriorityRange, cuCtxGetStreamPriorityRange, (int* least, int* greatest), (least, greatest))

// --- memory

SAME(hipMalloc, cuMemAlloc_v2, (Address * memory, size_t bytes), (memory, bytes))
SAME(hipFree, cuMemFree_v2, (Address memory), (memory))
SAME(hipMemGetInfo, cuMemGetInfo_v2, (size_t * free, size_t* total), (free, total))
SAME(hipHostRegister, cuMemHostRegister_v2, (void* memory, size_t bytes, unsigned flags), (memory, bytes, flags))
SAME(hipHostUnregister, cuMemHostUnregister, (void* memory), (memory))
SAME(hipMemGetAllocationGranularity, cuMemGetAllocationGranularity,
     (size_t * bytes, const void* properties, int option), (bytes, properties, option))
SAME(hipMemAddressReserve, cuMemAddressReserve,
     (Address * memory, size_t bytes, size_t alignment, Address at, unsigned long long flags),
     (memory, bytes, alignment, at, flags))
SAME(hipMemAddressFree, cuMemAddressFree, (Address memory, size_t bytes), (memory, bytes))
SAME(hipMemCreate, cuMemCreate, (Handle * made, size_t bytes, const void* properties, unsigned long long flags),
     (made, bytes, properties, flags))
SAME(hipMemRelease, cuMemRelease, (Handle memory), (memory))
SAME(hipMemMap, cuMemMap, (Address at, size_t bytes, size_t offset, Handle memory, unsigned long long flags),
     (at, bytes, offset, memory, flags))
SAME(hipMemUnmap, cuMemUnmap, (Address at, size_t bytes), (at, bytes))
SAME(hipMemSetAccess, cuMemSetAccess, (Address at, size_t bytes, const void* given, size_t count),
     (at, bytes, given, count))
SAME(hipMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, (Address to, const void* from, size_t bytes, Handle stream),
     (to, from, bytes, stream))
SAME(hipMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, (void* to, Address from, size_t bytes, Handle stream),
     (to, from, bytes, stream))
SAME(hipMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, (Address to, Address from, size_t bytes, Handle stream),
     (to, from, bytes, stream))
SAME(hipMemsetD8Async, cuMemsetD8Async, (Address to, unsigned char value, size_t bytes, Handle stream),
     (to, value, bytes, stream))
SAME(hipIpcGetMemHandle, cuIpcGetMemHandle, (void* handle, Address memory), (handle, memory))
SAME(hipIpcOpenMemHandle, cuIpcOpenMemHandle_v2, (Address * memory, IpcHandle handle, unsigned flags),
     (memory, handle, flags))
SAME(hipIpcCloseMemHandle, cuIpcCloseMemHandle, (Address memory), (memory))

API hipMemcpyAsync(Address to, Address from, size_t bytes, int kind, Handle stream) {
  RETURN_STATUS(enter_context(__func__));
  return kind < 0 || kind > 4 ? kInvalidValue : cuMemcpyAsync(to, from, bytes, stream);
}

// --- streams and events

SAME(hipStreamCreateWithFlags, cuStreamCreate, (Handle * stream, unsigned flags), (stream, flags))
SAME(hipStreamCreateWithPriority, cuStreamCreateWithPriority, (Handle * stream, unsigned flags, int priority),
     (stream, flags, priority))
SAME(hipStreamDestroy, cuStreamDestroy_v2, (Handle stream), (stream))
SAME(hipStreamQuery, cuStreamQuery, (Handle stream), (stream))
SAME(hipStreamSynchronize, cuStreamSynchronize, (Handle stream), (stream))
SAME(hipStreamWaitEvent, cuStreamWaitEvent, (Handle stream, Handle event, unsigned flags), (stream, event, flags))
SAME(hipStreamBeginCapture, cuStreamBeginCapture_v2, (Handle stream, int mode), (stream, mode))
SAME(hipStreamEndCapture, cuStreamEndCapture, (Handle stream, Handle* graph), (stream, graph))
SAME(hipStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2,
     (Handle stream, int* status, uint64_t* id, Handle* graph, const Handle** nodes, size_t* count),
     (stream, status, id, graph, nodes, count))
SAME(hipThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int* mode), (mode))
SAME(hipEventCreateWithFlags, cuEventCreate, (Handle * event, unsigned flags), (event, flags))
SAME(hipEventDestroy, cuEventDestroy_v2, (Handle event), (event))
SAME(hipEventRecord, cuEventRecord, (Handle event, Handle stream), (event, stream))
SAME(hipEventQuery, cuEventQuery, (Handle event), (event))
SAME(hipEventSynchronize, cuEventSynchronize, (Handle event), (event))
SAME(hipEventElapsedTime, cuEventElapsedTime, (float* milliseconds, Handle start, Handle end),
     (milliseconds, start, end))
SAME(hipIpcGetEventHandle, cuIpcGetEventHandle, (void* handle, Handle event), (handle, event))
SAME(hipIpcOpenEventHandle, cuIpcOpenEventHandle, (Handle * event, IpcHandle handle), (event, handle))
SAME(hipLaunchHostFunc, cuLaunchHostFunc, (Handle stream, void (*function)(void*), void* argument),
     (stream, function, argument))

API hipStreamGetDevice(Handle stream, int* device) {
  RETURN_STATUS(enter_context(__func__));
  Handle context = nullptr;
  RETURN_STATUS(cuStreamGetCtx(stream, &context));
  RETURN_STATUS(cuCtxPushCurrent_v2(context));
  const int status = cuCtxGetDevice(device);
  cuCtxPopCurrent_v2(&context);
  return status;
}

// --- kernels

SAME(hipModuleLoadData, cuModuleLoadData, (Handle * module, const void* image), (module, image))
SAME(hipModuleUnload, cuModuleUnload, (Handle module), (module))
SAME(hipModuleGetFunction, cuModuleGetFunction, (Handle * function, Handle module, const char* name),
     (function, module, name))
SAME(hipFuncGetAttribute, cuFuncGetAttribute, (int* value, int attribute, Handle function),
     (value, attribute, function))
SAME(hipModuleLaunchKernel, cuLaunchKernel,
     (Handle kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
      unsigned block_z, unsigned shared, Handle stream, void** arguments, void** extra),
     (kernel, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, arguments, extra))

API hipModuleLaunchCooperativeKernel(
    Handle kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared, Handle stream, void** arguments) {
  RETURN_STATUS(enter_context(__func__));
  return cuLaunchCooperativeKernel(
      kernel, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, arguments);
}

// --- graphs

SAME(hipGraphCreate, cuGraphCreate, (Handle * graph, unsigned flags), (graph, flags))
SAME(hipGraphDestroy, cuGraphDestroy, (Handle graph), (graph))
SAME(hipGraphAddHostNode, cuGraphAddHostNode,
     (Handle * node, Handle graph, const Handle* after, size_t count, const void* params),
     (node, graph, after, count, params))
SAME(hipGraphAddChildGraphNode, cuGraphAddChildGraphNode,
     (Handle * node, Handle graph, const Handle* after, size_t count, Handle child),
     (node, graph, after, count, child))
SAME(hipGraphInstantiateWithFlags, cuGraphInstantiateWithFlags,
     (Handle * executable, Handle graph, unsigned long long flags), (executable, graph, flags))
SAME(hipGraphExecChildGraphNodeSetParams, cuGraphExecChildGraphNodeSetParams,
     (Handle executable, Handle node, Handle child), (executable, node, child))
SAME(hipGraphLaunch, cuGraphLaunch, (Handle executable, Handle stream), (executable, stream))
SAME(hipGraphExecDestroy, cuGraphExecDestroy, (Handle executable), (executable))
SAME(hipUserObjectCreate, cuUserObjectCreate,
     (Handle * object, void* given, void (*destroy)(void*), unsigned references, unsigned flags),
     (object, given, destroy, references, flags))
SAME(hipUserObjectRelease, cuUserObjectRelease, (Handle object, unsigned references), (object, references))
SAME(hipGraphRetainUserObject, cuGraphRetainUserObject,
     (Handle graph, Handle object, unsigned references, unsigned flags), (graph, object, references, flags))

API hipGraphAddKernelNode(
    Handle* node, Handle graph, const Handle* after, size_t count, const HipKernelNode* given) {
  RETURN_STATUS(enter_context(__func__));
  const CUDA_KERNEL_NODE_PARAMS params = cuda_node(*given);
  return cuGraphAddKernelNode_v2(node, graph, after, count, &params);
}

API hipGraphExecKernelNodeSetParams(Handle executable, Handle node, const HipKernelNode* given) {
  RETURN_STATUS(enter_context(__func__));
  const CUDA_KERNEL_NODE_PARAMS params = cuda_node(*given);
  return cuGraphExecKernelNodeSetParams_v2(executable, node, &params);
}

API hipGraphAddMemcpyNode1D(
    Handle* node, Handle graph, const Handle* after, size_t count, Address to, Address from, size_t bytes, int kind) {
  RETURN_STATUS(enter_context(__func__));
  if (kind != 3) {
    return kInvalidValue; // the emulator's copies are within devices
  }
  const CUDA_MEMCPY3D params = cuda_copy(to, from, bytes);
  Handle context = nullptr;
  RETURN_STATUS(context_of(current_device, &context));
  return cuGraphAddMemcpyNode(node, graph, after, count, &params, context);
}

API hipGraphExecMemcpyNodeSetParams1D(
    Handle executable, Handle node, Address to, Address from, size_t bytes, int kind) {
  RETURN_STATUS(enter_context(__func__));
  if (kind != 3) {
    return kInvalidValue;
  }
  const CUDA_MEMCPY3D params = cuda_copy(to, from, bytes);
  Handle context = nullptr;
  RETURN_STATUS(context_of(current_device, &context));
  return cuGraphExecMemcpyNodeSetParams(executable, node, &params, context);
}

API hipGraphAddMemsetNode(Handle* node, Handle graph, const Handle* after, size_t count, const HipFill* given) {
  RETURN_STATUS(enter_context(__func__));
  const CUDA_MEMSET_NODE_PARAMS params = cuda_node(*given);
  Handle context = nullptr;
  RETURN_STATUS(context_of(current_device, &context));
  return cuGraphAddMemsetNode(node, graph, after, count, &params, context);
}

API hipGraphExecMemsetNodeSetParams(Handle executable, Handle node, const HipFill* given) {
  RETURN_STATUS(enter_context(__func__));
  const CUDA_MEMSET_NODE_PARAMS params = cuda_node(*given);
  Handle context = nullptr;
  RETURN_STATUS(context_of(current_device, &context));
  return cuGraphExecMemsetNodeSetParams(executable, node, &params, context);
}
