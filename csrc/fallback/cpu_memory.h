// CPU allocations that land in bp memory.
//
// A CPU kernel that runs in the name of a host-accessible bp device must put its results into that device's memory, or
// they would have to be copied there afterwards. So the CPU allocator is wrapped once: inside a CpuMemoryScope it takes
// memory from the bp device's caching allocator, everywhere else it passes the call on. The kernel writes at once, so the
// scope waits for what the device's current stream may still do to the memory.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

namespace backplane {

class CpuMemoryScope {
 public:
  explicit CpuMemoryScope(c10::DeviceIndex index);
  ~CpuMemoryScope();
  CpuMemoryScope(const CpuMemoryScope&) = delete;
  CpuMemoryScope& operator=(const CpuMemoryScope&) = delete;

 private:
  c10::DeviceIndex previous_;
};

// True when the storage's memory came out of a CpuMemoryScope, hence may be handed to bp as it is.
bool is_bp_memory(const c10::StorageImpl& storage);

} // namespace backplane
