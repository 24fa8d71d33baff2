// Attributes of kernels, and occupancy.

#include <algorithm>

#include "entry.h"
#include "functions.h"
#include "modules.h"

namespace {

constexpr int kMultiprocessorShared = 164 << 10, kBlockReserved = 1 << 10;
constexpr int kMultiprocessorThreads = 2048, kMultiprocessorBlocks = 32, kWarp = 32;

CUresult get_attribute(int* value, int attribute, const Function& function) {
  REQUIRE(value != nullptr, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(attribute >= 0 && attribute <= 15, CUDA_ERROR_INVALID_VALUE);
  const int values[] = {function.threads,
                        function.static_shared,
                        0,
                        0,
                        kRegisters,
                        capability(),
                        capability(),
                        0,
                        function.dynamic_shared,
                        -1};
  *value = attribute < static_cast<int>(std::size(values)) ? values[attribute] : 0;
  return CUDA_SUCCESS;
}

CUresult set_attribute(int attribute, int value, Function& function) {
  if (attribute == 8) { // the most dynamic shared memory
    REQUIRE(value >= 0 && value + function.static_shared <= kMostShared, CUDA_ERROR_INVALID_VALUE);
    function.dynamic_shared = value;
    return CUDA_SUCCESS;
  }
  const bool known = attribute == 9 || (attribute >= 10 && attribute <= 15);
  REQUIRE(known && (attribute != 9 || (value >= -1 && value <= 100)), CUDA_ERROR_INVALID_VALUE);
  return CUDA_SUCCESS;
}

} // namespace

CUresult occupancy(int* blocks, const Function& function, int threads, size_t shared) {
  REQUIRE(blocks != nullptr && threads > 0, CUDA_ERROR_INVALID_VALUE);
  const int all_shared = function.static_shared + static_cast<int>(shared);
  if (threads > function.threads || all_shared > kMostShared) {
    *blocks = 0;
    return CUDA_SUCCESS;
  }
  const int warps = (threads + kWarp - 1) / kWarp;
  *blocks = std::min(
      {kMultiprocessorBlocks, kMultiprocessorThreads / (warps * kWarp),
       kMultiprocessorShared / (all_shared + kBlockReserved)});
  return CUDA_SUCCESS;
}

// Declares `function`, of the parameter `handle`.
#define ENTER_FUNCTION()              \
  ENTER_UNLESS_FAILED();              \
  const auto function = find(handle); \
  REQUIRE(function != nullptr, CUDA_ERROR_INVALID_HANDLE)

API cuFuncGetAttribute(int* value, int attribute, CUfunction handle) {
  ENTER_FUNCTION();
  return get_attribute(value, attribute, *function);
}

API cuFuncSetAttribute(CUfunction handle, int attribute, int value) {
  ENTER_FUNCTION();
  return set_attribute(attribute, value, *function);
}

API cuKernelGetAttribute(int* value, int attribute, CUkernel handle, CUdevice device) {
  ENTER_FUNCTION();
  REQUIRE(device_at(device) != nullptr, CUDA_ERROR_INVALID_DEVICE);
  return get_attribute(value, attribute, *function);
}

API cuKernelSetAttribute(int attribute, int value, CUkernel handle, CUdevice device) {
  ENTER_FUNCTION();
  REQUIRE(device_at(device) != nullptr, CUDA_ERROR_INVALID_DEVICE);
  return set_attribute(attribute, value, *function);
}

API cuFuncSetCacheConfig(CUfunction handle, int) {
  ENTER_FUNCTION();
  return CUDA_SUCCESS;
}

API cuFuncGetModule(CUmodule* module, CUfunction handle) {
  ENTER_FUNCTION();
  REQUIRE(module != nullptr, CUDA_ERROR_INVALID_VALUE);
  *module = function->module.lock().get();
  return CUDA_SUCCESS;
}

API cuFuncGetName(const char** name, CUfunction handle) {
  ENTER_FUNCTION();
  REQUIRE(name != nullptr, CUDA_ERROR_INVALID_VALUE);
  *name = function->name.c_str();
  return CUDA_SUCCESS;
}

API cuFuncGetParamInfo(CUfunction handle, size_t index, size_t* offset, size_t* bytes) {
  ENTER_FUNCTION();
  REQUIRE(offset != nullptr && index < function->parameter_bytes.size(), CUDA_ERROR_INVALID_VALUE);
  *offset = function->parameter_offsets[index];
  if (bytes != nullptr) {
    *bytes = function->parameter_bytes[index];
  }
  return CUDA_SUCCESS;
}

API cuFuncLoad(CUfunction handle) {
  ENTER_FUNCTION();
  return CUDA_SUCCESS;
}

API cuFuncIsLoaded(int* state, CUfunction handle) {
  ENTER_FUNCTION();
  REQUIRE(state != nullptr, CUDA_ERROR_INVALID_VALUE);
  *state = 1;
  return CUDA_SUCCESS;
}

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction handle, int threads, size_t shared) {
  ENTER_FUNCTION();
  return occupancy(blocks, *function, threads, shared);
}

API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, CUfunction handle, int threads, size_t shared, unsigned flags) {
  ENTER_FUNCTION();
  REQUIRE(flags <= 1, CUDA_ERROR_INVALID_VALUE);
  return occupancy(blocks, *function, threads, shared);
}

API cuOccupancyMaxPotentialBlockSize(
    int* grid, int* block, CUfunction handle, size_t (*shared_of)(int), size_t shared, int limit) {
  ENTER_FUNCTION();
  REQUIRE(grid != nullptr && block != nullptr && limit >= 0, CUDA_ERROR_INVALID_VALUE);
  const int most = std::min(function->threads, limit == 0 ? function->threads : limit);
  int best = 0;
  *block = 0;
  for (int threads = most; threads >= 1; threads = (threads - 1) / kWarp * kWarp) {
    int blocks = 0;
    RETURN_ERROR(occupancy(&blocks, *function, threads, shared_of == nullptr ? shared : shared_of(threads)));
    if (blocks * threads > best) {
      best = blocks * threads;
      *block = threads;
      *grid = blocks;
    }
  }
  return CUDA_SUCCESS;
}
