// A source of segments other than the device: functions of the program, like torch.cuda's pluggable allocators.
#pragma once

#include <cstddef>

namespace backplane {

struct MemorySource {
  // `stream`: the value of torch.bp.Stream.bp_stream. `allocate` returns nullptr if it is out of memory.
  void* (*allocate)(std::ptrdiff_t bytes, int device, void* stream);
  void (*free)(void* memory, std::ptrdiff_t bytes, int device, void* stream);
};

} // namespace backplane
