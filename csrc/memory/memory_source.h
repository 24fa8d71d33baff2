// Where segments come from in place of the device's own memory: functions that a program gives, as torch.cuda's pluggable
// allocators are.
#pragma once

#include <sys/types.h>

namespace backplane {

struct MemorySource {
  // `stream`: what torch.bp.Stream.bp_stream is. The first returns nullptr where there is no more memory.
  void* (*allocate)(ssize_t bytes, int device, void* stream);
  void (*free)(void* memory, ssize_t bytes, int device, void* stream);
};

} // namespace backplane
