// What the emulated libraries have in common: they submit to streams and know memory through libcuda, as NVIDIA's do.

#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <functional>

#include "cuda_api.h"
#include "faults.h"

#define API extern "C" __attribute__((visibility("default"))) int

extern "C" CUresult cuCtxGetCurrent(CUcontext*);
extern "C" CUresult cuPointerGetAttribute(void*, int attribute, CUdeviceptr);
extern "C" CUresult emulator_submit(CUstream, const std::function<void()>*);
extern "C" CUresult emulator_prepare();

// What each function does first: an injected fault ends it.
#define ENTER()                               \
  if (const int fault = fault_of(__func__)) { \
    return fault;                             \
  }

#define REQUIRE(condition, status) \
  if (!(condition)) {              \
    return status;                 \
  }

#define RETURN_STATUS(call)         \
  if (const int status_ = (call)) { \
    return status_;                 \
  }

inline CUcontext current_context() {
  CUcontext current = nullptr;
  return cuCtxGetCurrent(&current) == CUDA_SUCCESS ? current : nullptr;
}

// Whether the first and the last byte of a range are memory of a device.
inline bool is_device_memory(const void* begin, size_t bytes) {
  constexpr int memory_type = 2, device = 2; // CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE
  const auto first = reinterpret_cast<CUdeviceptr>(begin);
  unsigned types[2] = {};
  return bytes != 0 && cuPointerGetAttribute(&types[0], memory_type, first) == CUDA_SUCCESS &&
      cuPointerGetAttribute(&types[1], memory_type, first + bytes - 1) == CUDA_SUCCESS && types[0] == device &&
      types[1] == device;
}

// Calls a function in the order of the stream.
inline CUresult submit(CUstream stream, const std::function<void()>& work) {
  return emulator_submit(stream, &work);
}

// The major version, from the name of the library that contains a function: 13 in libcublas.so.13.
inline int version_of(const void* function) {
  Dl_info info;
  const char* suffix = dladdr(function, &info) == 0 ? nullptr : strstr(info.dli_fname, ".so.");
  return suffix == nullptr ? 0 : atoi(suffix + strlen(".so."));
}

// cublasGetProperty and the like: the version's three numbers.
inline int property(const void* function, int which, int* value, int invalid) {
  if (which < 0 || which > 2 || value == nullptr) {
    return invalid;
  }
  *value = which == 0 ? version_of(function) : 0;
  return 0;
}
