#include "streams/sync_debug.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <string>

#include "devices/operator_scope.h"

namespace backplane {
namespace {

std::atomic<SyncDebugMode> chosen{SyncDebugMode::Off};

} // namespace

void set_sync_debug_mode(SyncDebugMode mode) {
  chosen = mode;
}

SyncDebugMode sync_debug_mode() {
  return chosen;
}

void note_synchronization() {
  const SyncDebugMode mode = chosen.load(std::memory_order_relaxed);
  if (C10_LIKELY(mode == SyncDebugMode::Off)) {
    return;
  }
  const std::string name = OperatorScope::name();
  const std::string text = "called a synchronizing bp operation" + (name.empty() ? std::string() : ": " + name);
  TORCH_CHECK(mode != SyncDebugMode::Error, text);
  TORCH_WARN(text);
}

} // namespace backplane
