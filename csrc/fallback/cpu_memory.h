// CPU allocations from bp memory.
//
// A CPU kernel that runs for a host-accessible bp device should write its results directly to that device's memory;
// otherwise they would have to be copied. This wraps PyTorch's CPU allocator: inside a CpuMemoryScope, it allocates
// from the bp device's caching allocator; elsewhere, it forwards to PyTorch's. The kernel writes immediately, so an
// allocation in the scope waits for the commands of the device's current stream that may still use the memory.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

namespace backplane {

// While it exists, this thread's CPU allocations come from the device's memory.
class CpuMemoryScope {
 public:
  explicit CpuMemoryScope(c10::DeviceIndex index);
  ~CpuMemoryScope();
  CpuMemoryScope(const CpuMemoryScope&) = delete;
  CpuMemoryScope& operator=(const CpuMemoryScope&) = delete;

 private:
  c10::DeviceIndex previous_;
};

// Whether the storage's memory was allocated in a CpuMemoryScope, and can become bp memory without a copy.
bool is_bp_memory(const c10::StorageImpl& storage);

} // namespace backplane
