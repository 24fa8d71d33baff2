// Makes a c10::Event own an existing event. c10 offers no setter, so the guard's next record() hands the event over.
#pragma once

#include <c10/core/Event.h>

#include <utility>

#include "streams/stream.h"

namespace backplane {

class AdoptedEvent {
 public:
  // Transfers ownership of `event` to `owner`. Does not record it.
  static void give(c10::Event& owner, Event* event) {
    next_ = event;
    owner.record(default_stream(event->device));
  }
  // Called by the guard's record(). Returns nullptr unless give() is in progress in this thread.
  static Event* take() noexcept {
    return std::exchange(next_, nullptr);
  }

 private:
  static inline thread_local Event* next_ = nullptr;
};

} // namespace backplane
