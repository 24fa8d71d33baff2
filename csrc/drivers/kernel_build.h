// Building kernels in the background, and the commands that wait for them.
//
// `KernelBuild` is one build: requested by one thread, executed by whichever thread comes first (one of the pool of
// torch_backplane.drivers.builds, or a thread that needs the kernel now). `DeferredCommands` holds the commands of one
// stream that were submitted behind a kernel that was not built. They execute in order as builds finish, in the thread that
// finished a build or in one that uses the stream.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "devices/command.h"

namespace backplane {

class KernelBuild : public c10::intrusive_ptr_target {
 public:
  bool is_built() const noexcept {
    return state_.load(std::memory_order_acquire) == State::Built;
  }
  // Built, or failed.
  bool is_over() const noexcept {
    return state_.load(std::memory_order_acquire) >= State::Built;
  }
  // Throws what the build failed with; only when it is over.
  void check() const;
  // Does the build, unless somebody has begun. Never throws.
  void run() noexcept;
  // Returns when the build is over; does it where nobody has begun. The caller does not have the GIL.
  void wait() noexcept;

 protected:
  virtual void build() = 0; // called once; what it throws is the failure
  virtual void finished() noexcept = 0; // called after that, when is_over()

 private:
  enum class State { Asked, Running, Built, Failed };

  std::atomic<State> state_{State::Asked};
  std::exception_ptr failure_; // written before the state says so
  std::mutex lock_;
  std::condition_variable changed_;
};

class DeferredCommands {
 public:
  using Execute = std::function<void(const Command&)>;

  // `execute` gives a command to the driver.
  explicit DeferredCommands(Execute execute) : execute_(std::move(execute)) {}

  // True while commands must go through submit(), or an error waits to be thrown.
  bool any() const noexcept {
    return any_.load(std::memory_order_acquire);
  }
  // True while a command has not been given to the driver.
  bool is_waiting() const;
  // Appends a command, which executes when `kernel` (which may be null) is built and all earlier commands have executed.
  // That may be before this returns; no lock is held meanwhile. An exception is kept for rethrow(). Blocks while many wait.
  void submit(c10::intrusive_ptr<KernelBuild> kernel, StoredCommand command);
  // Executes the commands in front that need not wait. Never throws.
  void issue_ready() noexcept;
  // Waits for the builds, and executes all commands that were submitted before. Never throws.
  void issue_all() noexcept;
  // Keeps an exception for rethrow(), unless there is one.
  void keep_failure(std::exception_ptr failure) noexcept;
  // Throws the first exception of a command or a build, once.
  void rethrow();

 private:
  struct Waiting {
    c10::intrusive_ptr<KernelBuild> kernel;
    StoredCommand stored;
  };

  void issue(Waiting waiting) noexcept;
  void update() noexcept; // any_, under the lock

  const Execute execute_;
  mutable std::mutex lock_; // never held while a command or a build runs
  std::condition_variable changed_;
  std::deque<Waiting> commands_;
  bool issuing_ = false; // one thread is executing a command, `issuer_`
  std::thread::id issuer_;
  std::exception_ptr failure_;
  std::atomic<bool> any_{false};
};

} // namespace backplane
