// Memory and events that processes share (CUDA: cuIpcGetMemHandle, cuIpcGetEventHandle).
#pragma once

#include <array>
#include <cstddef>

#include "devices/command.h"

namespace backplane {

// A name that another process can open.
using InterprocessHandle = std::array<char, 64>;

struct ExportedMemory {
  InterprocessHandle handle; // of the segment
  size_t segment_bytes;
  size_t offset; // of the address in the segment
};

// Thread-safe, as Device's methods.
class Interprocess {
 public:
  virtual ~Interprocess() = default;
  virtual ExportedMemory export_memory(const void* address, size_t bytes) = 0;
  // The address of an imported segment. The exporting process keeps the memory until it is closed here.
  virtual void* import_memory(const InterprocessHandle& handle, size_t segment_bytes) = 0;
  virtual void close_memory(void* address, size_t segment_bytes) = 0;
  // An event without timing that can be exported.
  virtual EventHandle create_event() = 0;
  virtual InterprocessHandle export_event(EventHandle event) = 0;
  virtual EventHandle import_event(const InterprocessHandle& handle) = 0;
};

} // namespace backplane
