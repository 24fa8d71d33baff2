// Building kernels in the background, and the commands that wait for them.
//
// `KernelBuild` is one build: asked for by one thread, done by whoever comes first (a thread of the pool of
// torch_backplane.drivers.builds, or a thread that needs the kernel now). `DeferredCommands` are the commands of one
// stream that came while a kernel in front of them was not built: they are given to the driver in their order, as the
// builds get done, by the thread that finished a build or by one that uses the stream.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

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
  // True while commands must go through submit(), or an error waits to be thrown.
  bool any() const noexcept {
    return any_.load(std::memory_order_acquire);
  }
  // True while a command has not been given to the driver.
  bool is_waiting() const;
  // Appends a command, to be called when `kernel` (which may be null) is built and all earlier ones have been called.
  // That may be before this returns; no lock is held meanwhile. What it throws is kept for rethrow(). Where many wait, this
  // waits for the builds.
  void submit(c10::intrusive_ptr<KernelBuild> kernel, std::function<void()> command);
  // Calls the commands in front that need not wait. Never throws.
  void issue_ready() noexcept;
  // Waits for the builds, and calls all commands that were submitted before. Never throws.
  void issue_all() noexcept;
  // Throws the first error of a command or build, once.
  void rethrow();

 private:
  struct Command {
    c10::intrusive_ptr<KernelBuild> kernel;
    std::function<void()> call;
  };

  void issue(Command command) noexcept;
  void update() noexcept; // any_, under the lock

  mutable std::mutex lock_; // never held while a command or a build runs
  std::condition_variable changed_;
  std::deque<Command> commands_;
  bool issuing_ = false; // one thread is calling a command, `issuer_`
  std::thread::id issuer_;
  std::exception_ptr failure_;
  std::atomic<bool> any_{false};
};

} // namespace backplane
