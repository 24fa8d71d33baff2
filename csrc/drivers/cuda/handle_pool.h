// Handles of a library, which are for one thread at a time.
#pragma once

#include <c10/util/FunctionRef.h>

#include <array>
#include <mutex>
#include <vector>

#include "drivers/cuda/cuda_calls.h"
#include "drivers/cuda/cuda_launcher.h"

namespace backplane::cuda {

// The handles of a device that no thread uses. As what a handle keeps for a stream is set for each call, any handle
// will do, and there are as many as threads that submit at the same time. Handles live as long as the process, as
// contexts do.
template <typename Handle>
class HandlePool {
 public:
  // Calls `use` with a handle that no other thread uses, which `make` makes if there is none. Returns the first status
  // other than 0.
  int with(c10::function_ref<int(Handle* made)> make, c10::function_ref<int(const Handle&)> use) {
    Handle handle{};
    if (!take(&handle)) {
      const OutsideCapture allocates;
      if (const int status = make(&handle)) {
        return status;
      }
    }
    const int status = use(handle);
    const std::lock_guard<std::mutex> guard(mutex_);
    unused_.push_back(handle);
    return status;
  }

 private:
  bool take(Handle* handle) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (unused_.empty()) {
      return false;
    }
    *handle = unused_.back();
    unused_.pop_back();
    return true;
  }

  std::mutex mutex_;
  std::vector<Handle> unused_;
};

template <typename Handle>
using HandlePools = std::array<HandlePool<Handle>, kMostDevices>;

} // namespace backplane::cuda
