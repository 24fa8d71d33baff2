// Memory and events that are shared between processes (CUDA: cuIpcGetMemHandle, cuIpcGetEventHandle).
#pragma once

#include <array>
#include <cstddef>

#include "devices/command.h"

namespace backplane {

// A handle that another process can open.
using InterprocessHandle = std::array<char, 64>;

struct ExportedMemory {
  InterprocessHandle handle; // of the segment
  size_t segment_bytes;
  size_t offset; // of the address in the segment
};

// Thread-safe, like Device.
class Interprocess {
 public:
  virtual ~Interprocess() = default;
  virtual ExportedMemory export_memory(const void* address, size_t bytes) = 0;
  // Returns the address of the imported segment. The exporting process keeps the memory until it is closed here.
  virtual void* import_memory(const InterprocessHandle& handle, size_t segment_bytes) = 0;
  virtual void close_memory(void* address, size_t segment_bytes) = 0;
  // Creates an event without timing that can be exported.
  virtual EventHandle create_event() = 0;
  virtual InterprocessHandle export_event(EventHandle event) = 0;
  virtual EventHandle import_event(const InterprocessHandle& handle) = 0;
};

} // namespace backplane
