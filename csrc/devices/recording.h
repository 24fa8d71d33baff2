// What the layers below plans tell of what passes them in a thread in which a planner is at work (plans/recorder.h).
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <string>

namespace backplane {

// Whoever takes down what this thread does.
class Recording {
 public:
  virtual ~Recording() = default;

  // Of this thread; nullptr: nobody is recording.
  static Recording* active() noexcept {
    return active_;
  }

  virtual void allocated(void* memory, size_t bytes) = 0;
  virtual void freed(void* memory) = 0;
  virtual void cannot_replay(std::string reason) = 0;

 protected:
  static inline thread_local Recording* active_ = nullptr;
};

// To be called by whatever a replay could not repeat; `what` in words.
inline void note_not_replayable(const char* what) {
  if (auto* recording = Recording::active()) {
    recording->cannot_replay(what);
  }
}

// Whoever looks at the memory that this thread writes to.
class WriteWatch {
 public:
  virtual ~WriteWatch() = default;

  // Memory is written, or, if not `surely`, given to something that may write to it. Throws where a planner writes to an
  // argument that its schema does not say is written.
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
