// An event that a c10::Event receives instead of making one at its first recording: c10 has no other way in.
#pragma once

#include <c10/core/Event.h>

#include <utility>

#include "streams/stream.h"

namespace backplane {

class AdoptedEvent {
 public:
  // `owner` owns `event` afterwards, which is not recorded by this.
  static void give(c10::Event& owner, Event* event) {
    next_ = event;
    owner.record(default_stream(event->device));
  }
  // For the guard's record().
  static Event* take() noexcept {
    return std::exchange(next_, nullptr);
  }

 private:
  static inline thread_local Event* next_ = nullptr;
};

} // namespace backplane
