// Through this interface the layers below plans report to the recorder of a running planner (plans/recorder.h).
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <string>

namespace backplane {

// Records the actions of a thread.
class Recording {
 public:
  virtual ~Recording() = default;

  // The recording of this thread; nullptr: none.
  static Recording* active() noexcept {
    return active_;
  }

  virtual void allocated(void* memory, size_t bytes) = 0;
  virtual void freed(void* memory) = 0;
  virtual void cannot_replay(std::string reason) = 0;

 protected:
  static inline thread_local Recording* active_ = nullptr;
};

// Called by every action that a replay could not repeat. `what`: the reason, for messages.
inline void note_not_replayable(const char* what) {
  if (auto* recording = Recording::active()) {
    recording->cannot_replay(what);
  }
}

// Observes the memory that a thread writes to.
class WriteWatch {
 public:
  virtual ~WriteWatch() = default;

  // Reports a write to memory or, without `surely`, a possible write. Throws if a planner surely writes to an argument
  // that its schema does not mark as written.
  static void wrote(const c10::Storage& memory, bool surely = true) {
    if (innermost_ != nullptr) {
      innermost_->note_write(memory.unsafeGetStorageImpl(), surely);
    }
  }

 protected:
  virtual void note_write(const c10::StorageImpl* storage, bool surely) = 0;

  static inline thread_local WriteWatch* innermost_ = nullptr;
};

} // namespace backplane
