// torch.bp.set_sync_debug_mode: telling which operators make the host wait for a device.
#pragma once

#include <cstdint>

namespace backplane {

enum class SyncDebugMode : uint8_t { Off, Warn, Error };

void set_sync_debug_mode(SyncDebugMode mode);
SyncDebugMode sync_debug_mode();

// To be called before the host waits, and before the device is given what it waits for. Warns or throws in these modes, naming
// the operator that this thread runs.
void note_synchronization();

} // namespace backplane
