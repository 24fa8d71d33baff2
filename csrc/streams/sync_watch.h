// Observes which work waits for which, for the stream sanitizer (torch_backplane/testing/sanitizer.py).
#pragma once

#include <c10/core/Stream.h>

#include <atomic>

namespace backplane {

struct Event;

class SyncWatch {
 public:
  virtual ~SyncWatch() = default;

  virtual void recorded(const Event* event, c10::Stream stream) = 0;
  virtual void waits(c10::Stream stream, const Event* event) = 0;
  // The host has waited for the event, or has queried it and found it completed.
  virtual void host_passed(const Event* event) = 0;
  virtual void host_passed(c10::Stream stream) = 0; // all its work
  virtual void host_passed(c10::DeviceIndex device) = 0; // all its work
  virtual void destroyed(const Event* event) = 0;

  // nullptr: none. A watch must never be destroyed after set_active(), since other threads can be using it.
  static SyncWatch* active() noexcept {
    return active_.load(std::memory_order_acquire);
  }
  static void set_active(SyncWatch* watch) noexcept {
    active_.store(watch, std::memory_order_release);
  }

  // Hides this thread's waits from the watch during its lifetime: waits that are due to the implementation of an
  // operator, not to a request of the program.
  class Hidden {
   public:
    Hidden() noexcept {
      ++hidden_;
    }
    ~Hidden() {
      --hidden_;
    }
    Hidden(const Hidden&) = delete;
    Hidden& operator=(const Hidden&) = delete;
  };
  static bool is_hidden() noexcept {
    return hidden_ > 0;
  }

 private:
  static inline thread_local int hidden_ = 0;
  static inline std::atomic<SyncWatch*> active_{nullptr};
};

} // namespace backplane
