#include "drivers/hip/hip_functions.h"

#include <cstddef>

#include "drivers/cuda/cuda_api.h"
#include "drivers/hip/hip_api.h"
#include "drivers/native_launcher.h"

namespace backplane::hip {
namespace {

using cuda::CopyNodeParams;
using cuda::FillNodeParams;
using cuda::LaunchConfig;

Api api;

void* pointer(uint64_t address) {
  return reinterpret_cast<void*>(address);
}

// --- contexts

int device_of(void* context) {
  return static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
}

void* context_of(int device) {
  return reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
}

thread_local std::vector<int> devices_before; // of each context that was pushed

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = context_of(device);
  return 0;
}

int cuCtxGetCurrent(void** context) {
  int device = 0;
  const int status = api.hipGetDevice(&device);
  *context = context_of(device);
  return status;
}

int cuCtxPushCurrent(void* context) {
  int before = 0;
  if (const int status = api.hipGetDevice(&before)) {
    return status;
  }
  const int status = api.hipSetDevice(device_of(context));
  if (status == 0) {
    devices_before.push_back(before);
  }
  return status;
}

int cuCtxPopCurrent(void** context) {
  if (devices_before.empty()) {
    return kInvalidContext;
  }
  if (const int status = cuCtxGetCurrent(context)) {
    return status;
  }
  const int before = devices_before.back();
  devices_before.pop_back();
  return api.hipSetDevice(before);
}

int cuStreamGetCtx(void* stream, void** context) {
  int device = 0;
  const int status = api.hipStreamGetDevice(stream, &device);
  *context = context_of(device);
  return status;
}

int cuCtxEnablePeerAccess(void* peer, unsigned flags) {
  return api.hipDeviceEnablePeerAccess(device_of(peer), flags);
}

// --- launches and copies

int cuLaunchKernelEx(const LaunchConfig* config, void* kernel, void** arguments, void** extra) {
  bool is_cooperative = false;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    if (config->attributes[i].id != cuda::kCooperative) {
      return cuda::kNotSupported; // clusters
    }
    is_cooperative = config->attributes[i].value.cooperative != 0;
  }
  const unsigned *grid = config->grid, *block = config->block;
  return is_cooperative ? api.hipModuleLaunchCooperativeKernel(
                              kernel, grid[0], grid[1], grid[2], block[0], block[1], block[2], config->shared_memory,
                              config->stream, arguments)
                        : api.hipModuleLaunchKernel(
                              kernel, grid[0], grid[1], grid[2], block[0], block[1], block[2], config->shared_memory,
                              config->stream, arguments, extra);
}

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  return api.hipMemcpyAsync(pointer(to), pointer(from), bytes, kDefault, stream);
}

// --- nodes of graphs

KernelNodeParams params_of(const cuda::KernelNodeParams& given) {
  return {{given.block[0], given.block[1], given.block[2]}, given.extra,     given.function,
          {given.grid[0], given.grid[1], given.grid[2]},    given.arguments, given.shared_memory};
}

MemsetParams params_of(const FillNodeParams& given) {
  return {pointer(given.destination), given.element_size, given.height, given.pitch, given.value, given.width};
}

int cuGraphAddKernelNode(
    void** node, void* graph, void* const* after, size_t count, const cuda::KernelNodeParams* given) {
  const KernelNodeParams params = params_of(*given);
  return api.hipGraphAddKernelNode(node, graph, after, count, &params);
}

int cuGraphExecKernelNodeSetParams(void* executable, void* node, const cuda::KernelNodeParams* given) {
  const KernelNodeParams params = params_of(*given);
  return api.hipGraphExecKernelNodeSetParams(executable, node, &params);
}

// The launcher's copies are of one row, within the memory of devices.
int cuGraphAddMemcpyNode(
    void** node, void* graph, void* const* after, size_t count, const CopyNodeParams* given, void*) {
  return api.hipGraphAddMemcpyNode1D(
      node, graph, after, count, pointer(given->destination.device), pointer(given->source.device), given->width,
      kDeviceToDevice);
}

int cuGraphExecMemcpyNodeSetParams(void* executable, void* node, const CopyNodeParams* given, void*) {
  return api.hipGraphExecMemcpyNodeSetParams1D(
      executable, node, pointer(given->destination.device), pointer(given->source.device), given->width,
      kDeviceToDevice);
}

int cuGraphAddMemsetNode(
    void** node, void* graph, void* const* after, size_t count, const FillNodeParams* given, void*) {
  const MemsetParams params = params_of(*given);
  return api.hipGraphAddMemsetNode(node, graph, after, count, &params);
}

int cuGraphExecMemsetNodeSetParams(void* executable, void* node, const FillNodeParams* given, void*) {
  const MemsetParams params = params_of(*given);
  return api.hipGraphExecMemsetNodeSetParams(executable, node, &params);
}

} // namespace

std::vector<std::string> adapted_names() {
#define BACKPLANE_HIP_NAME(name, parameters) #name,
  return {BACKPLANE_HIP_FUNCTIONS(BACKPLANE_HIP_NAME)};
#undef BACKPLANE_HIP_NAME
}

std::map<std::string, uintptr_t> adapt(const std::map<std::string, uintptr_t>& functions) {
#define BACKPLANE_HIP_LOAD(name, parameters) \
  api.name = reinterpret_cast<int(*) parameters>(function_of(functions, "HIP", #name));
  BACKPLANE_HIP_FUNCTIONS(BACKPLANE_HIP_LOAD)
#undef BACKPLANE_HIP_LOAD
  std::map<std::string, uintptr_t> all;
#define BACKPLANE_HIP_ADAPTED(name) all[#name] = reinterpret_cast<uintptr_t>(&name);
  BACKPLANE_HIP_ADAPTED(cuDevicePrimaryCtxRetain)
  BACKPLANE_HIP_ADAPTED(cuCtxGetCurrent)
  BACKPLANE_HIP_ADAPTED(cuCtxPushCurrent)
  BACKPLANE_HIP_ADAPTED(cuCtxPopCurrent)
  BACKPLANE_HIP_ADAPTED(cuStreamGetCtx)
  BACKPLANE_HIP_ADAPTED(cuCtxEnablePeerAccess)
  BACKPLANE_HIP_ADAPTED(cuLaunchKernelEx)
  BACKPLANE_HIP_ADAPTED(cuMemcpyAsync)
  BACKPLANE_HIP_ADAPTED(cuGraphAddKernelNode)
  BACKPLANE_HIP_ADAPTED(cuGraphAddMemcpyNode)
  BACKPLANE_HIP_ADAPTED(cuGraphAddMemsetNode)
  BACKPLANE_HIP_ADAPTED(cuGraphExecKernelNodeSetParams)
  BACKPLANE_HIP_ADAPTED(cuGraphExecMemcpyNodeSetParams)
  BACKPLANE_HIP_ADAPTED(cuGraphExecMemsetNodeSetParams)
#undef BACKPLANE_HIP_ADAPTED
  return all;
}

} // namespace backplane::hip
