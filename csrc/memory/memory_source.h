// A source of segments other than the device: functions of the program, like torch.cuda's pluggable allocators.
#pragma once

#include <sys/types.h>

namespace backplane {

struct MemorySource {
  // `stream`: the value of torch.bp.Stream.bp_stream. `allocate` returns nullptr if it is out of memory.
  void* (*allocate)(ssize_t bytes, int device, void* stream);
  void (*free)(void* memory, ssize_t bytes, int device, void* stream);
};

} // namespace backplane
