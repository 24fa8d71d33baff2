// torch.bp.set_sync_debug_mode: reports the operators that make the host wait for a device.
#pragma once

#include <cstdint>

namespace backplane {

enum class SyncDebugMode : uint8_t { Off, Warn, Error };

void set_sync_debug_mode(SyncDebugMode mode);
SyncDebugMode sync_debug_mode();

// Must be called before the host waits, and before the work that it waits for is submitted. In the modes Warn and Error
// it warns or throws, and names the operator that this thread runs.
void note_synchronization();

} // namespace backplane
