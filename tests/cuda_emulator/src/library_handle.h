// Handles of the emulated libraries, as NVIDIA's: for one thread at a time, and for the context of their creation.

#pragma once

#include <atomic>

#include "device_library.h"
#include "registry.h"

struct LibraryHandle {
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  std::atomic<bool> in_use{false};
};

// Finds a handle for one call.
template <class Handle>
class Use {
 public:
  explicit Use(Handle* given) : handle(find(given)) {
    owns_ = handle != nullptr && !handle->in_use.exchange(true);
  }
  ~Use() {
    if (owns_) {
      handle->in_use = false;
    }
  }

  // Returns `invalid`, `shared` (by two threads at a time) or `of_other_context`, or 0 if the handle can be used.
  int status(int invalid, int shared, int of_other_context) const {
    return handle == nullptr ? invalid : !owns_ ? shared : handle->context != current_context() ? of_other_context : 0;
  }

  std::shared_ptr<Handle> handle;

 private:
  bool owns_;
};

// Makes a handle for the current context. Returns null without a context, or in a capture that forbids allocations.
template <class Handle>
Handle* made_handle() {
  auto handle = std::make_shared<Handle>();
  handle->context = current_context();
  const bool can_be_made = handle->context != nullptr && emulator_prepare() == CUDA_SUCCESS;
  return can_be_made ? Registry<Handle>::all().add(handle) : nullptr;
}
