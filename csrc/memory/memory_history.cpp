#include "memory/memory_history.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>

namespace backplane {

namespace {
constexpr std::array<const char*, static_cast<size_t>(TraceAction::Count)> kNames = {
    "alloc",         "free_requested", "free_completed",
    "segment_alloc", "segment_free",   "segment_map",
    "segment_unmap", "snapshot",       "oom"};
} // namespace

const char* name_of(TraceAction action) {
  return kNames[static_cast<size_t>(action)];
}

TraceAction trace_action(const std::string& name) {
  auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) {
    std::string known;
    for (const char* other : kNames) {
      known += (known.empty() ? "" : ", ") + std::string(other);
    }
    TORCH_CHECK_VALUE(false, "unknown trace action '", name, "'; known actions are ", known);
  }
  return static_cast<TraceAction>(found - kNames.begin());
}

void MemoryHistory::configure(const HistorySettings& settings, bool clear) {
  settings_ = settings;
  settings_.max_entries = std::max<size_t>(1, settings.max_entries);
  gather_.store(settings.enabled ? settings.gather : nullptr, std::memory_order_release);
  when_.store(settings.enabled ? static_cast<int>(settings.when) : 0, std::memory_order_relaxed);
  if (clear || !settings.enabled || ring_.size() > settings_.max_entries) {
    ring_.clear();
    next_ = 0;
  } else if (next_ != 0) {
    // The ring can grow again: put the oldest entry first.
    std::rotate(ring_.begin(), ring_.begin() + static_cast<ptrdiff_t>(next_), ring_.end());
    next_ = 0;
  }
}

void MemoryHistory::record(
    TraceAction action,
    const void* address,
    size_t size,
    c10::StreamId stream,
    c10::MempoolId_t pool,
    const Context& context) {
  if (!settings_.enabled || (settings_.skipped >> static_cast<int>(action) & 1) != 0) {
    return;
  }
  TraceEntry entry{
      action,
      reinterpret_cast<size_t>(address),
      size,
      stream,
      pool,
      c10::getApproximateTime(),
      settings_.when >= RecordContext::Alloc ? context : nullptr,
      metadata_};
  if (ring_.size() < settings_.max_entries) {
    ring_.push_back(std::move(entry));
  } else {
    ring_[next_] = std::move(entry);
    next_ = (next_ + 1) % ring_.size();
  }
}

std::vector<TraceEntry> MemoryHistory::entries() const {
  std::vector<TraceEntry> result(ring_.begin() + static_cast<ptrdiff_t>(next_), ring_.end());
  result.insert(result.end(), ring_.begin(), ring_.begin() + static_cast<ptrdiff_t>(next_));
  return result;
}

} // namespace backplane
