// Events in memory that several processes share.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

struct SharedEvent {
  std::atomic<uint64_t> recorded{0}; // number of recordings
  std::atomic<uint64_t> done{0}; // the latest recording that is reached

  void finish(uint64_t ticket) {
    uint64_t before = done;
    while (before < ticket && !done.compare_exchange_weak(before, ticket)) {
    }
  }
};

// Returns null if the process has too many.
std::shared_ptr<SharedEvent> make_shared_event();
