// What launches, graphs and libraries of the CUDA driver have in common.
#pragma once

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <limits>

#include "drivers/cuda/cuda_api.h"
#include "drivers/native_launcher.h"

namespace backplane::cuda {

// The number of thread blocks in each dimension. Returns kInvalidValue if it exceeds CUDA's type, else 0.
inline int blocks_of(const uint64_t* items, const uint64_t* group, unsigned* blocks, unsigned* block) {
  for (int i = 0; i < 3; ++i) {
    const uint64_t count = items[i] / group[i];
    if (count > std::numeric_limits<unsigned>::max()) {
      return kInvalidValue;
    }
    blocks[i] = static_cast<unsigned>(count);
    block[i] = static_cast<unsigned>(group[i]);
  }
  return 0;
}

// The addresses of the values of a kernel's arguments. Memory is a pointer, whose offset is 0.
inline c10::SmallVector<void*, 64> values_of(const CArgument* arguments, uint64_t count) {
  c10::SmallVector<void*, 64> values;
  for (uint64_t i = 0; i < count; ++i) {
    const CArgument& one = arguments[i];
    values.push_back(const_cast<void*>(one.bytes == 0 ? static_cast<const void*>(&one.memory) : one.data));
  }
  return values;
}

inline uint64_t address_of(void* memory) {
  return reinterpret_cast<uint64_t>(memory);
}

// A host function of the runtime. It can submit commands, which CUDA's host functions must not, so another thread calls
// it while CUDA's thread waits.
struct HostCall {
  void (*function)(void*);
  void* argument;
};

// Calls a function of a library while the primary context of a device is current. Returns the function's status, or a
// CUresult as a negative number if the context cannot be current. `index`: as in make_launcher().
int call_in_context(size_t index, c10::function_ref<int()> function);

// While it exists, this thread can allocate and synchronize although a stream of the thread is captured. For what a
// library prepares once, which is no part of the captured work.
class OutsideCapture {
 public:
  OutsideCapture() : is_exchanged_(api.cuThreadExchangeStreamCaptureMode(&mode_) == 0) {}
  ~OutsideCapture() {
    if (is_exchanged_) {
      static_cast<void>(api.cuThreadExchangeStreamCaptureMode(&mode_));
    }
  }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  int mode_ = kCaptureRelaxed; // then the mode of the thread before
  const bool is_exchanged_;
};

using LibraryRoutine = int (*)(void* queue, const CArgument* arguments, uint64_t count);

// For cuLaunchHostFunc and graph nodes: calls the HostCall `given`, which stays valid.
void call_host_function(void* given);

} // namespace backplane::cuda
