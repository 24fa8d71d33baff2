// Whoever follows which work waits for which: the sanitizer of streams (torch_backplane/testing/sanitizer.py).
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
  // The host has waited for it, or has been told that it is reached.
  virtual void host_passed(const Event* event) = 0;
  virtual void host_passed(c10::Stream stream) = 0; // all that it was given
  virtual void host_passed(c10::DeviceIndex device) = 0; // … that the device was given
  virtual void destroyed(const Event* event) = 0;

  // nullptr: nobody does. It is kept for good by who sets it: other threads may be at it.
  static SyncWatch* active() noexcept {
    return active_.load(std::memory_order_acquire);
  }
  static void set_active(SyncWatch* watch) noexcept {
    active_.store(watch, std::memory_order_release);
  }

  // While it lives, this thread waits for nothing that the watch is told of: where it is by our own way of running an operator
  // that the host waits, and not by what the program asked for.
  class Unseen {
   public:
    Unseen() noexcept {
      ++unseen_;
    }
    ~Unseen() {
      --unseen_;
    }
    Unseen(const Unseen&) = delete;
    Unseen& operator=(const Unseen&) = delete;
  };
  static bool is_unseen() noexcept {
    return unseen_ > 0;
  }

 private:
  static inline thread_local int unseen_ = 0;
  static inline std::atomic<SyncWatch*> active_{nullptr};
};

} // namespace backplane
