// Background builds of kernels, and the commands that wait for them.
//
// A `KernelBuild` is executed by the first thread that gets to it: a thread of the pool of
// torch_backplane.drivers.builds, or a thread that needs the kernel. `DeferredCommands` holds the commands of a stream
// that were submitted behind a prerequisite: the launch of a kernel that is not built, or a wait for a signal of the
// host. They execute in order as builds finish and signals are set, in the thread that did this or in a thread that
// uses the stream.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "devices/command.h"
#include "devices/prerequisite.h"

namespace backplane {

class KernelBuild : public Prerequisite {
 public:
  bool is_built() const noexcept {
    return state_.load(std::memory_order_acquire) == State::Built;
  }
  bool is_over() const noexcept override {
    return state_.load(std::memory_order_acquire) >= State::Built;
  }
  void check() const override;
  // Does the build, unless it has been started. Never throws.
  void run() noexcept;
  // Waits for the build; does it if it has not been started.
  void wait() noexcept override;

 protected:
  virtual void build() = 0; // called once; its exception is kept for check()
  virtual void finished() noexcept = 0; // called after build(), when is_over()

 private:
  enum class State { Requested, Running, Built, Failed };

  std::atomic<State> state_{State::Requested};
  std::exception_ptr failure_; // written before the state becomes Failed
  std::mutex lock_;
  std::condition_variable changed_;
};

class DeferredCommands {
 public:
  using Execute = std::function<void(const Command&)>;

  // `execute` submits a command to the driver.
  explicit DeferredCommands(Execute execute) : execute_(std::move(execute)) {}

  // True while new commands must go through submit(), or an exception is kept for rethrow().
  bool any() const noexcept {
    return any_.load(std::memory_order_acquire);
  }
  // True while a command has not been submitted to the driver.
  bool is_waiting() const;
  // Appends a command (nullopt: only a wait). It executes when `prerequisite` (can be null) is over and all earlier
  // commands have executed. This can be before submit() returns; no lock is held then. An exception, also the
  // prerequisite's, is kept for rethrow(). If kMaxWaiting commands are deferred, waits until they have executed.
  void submit(c10::intrusive_ptr<Prerequisite> prerequisite, std::optional<StoredCommand> command);
  // Executes the first commands that do not have to wait. Never throws.
  void issue_ready() noexcept;
  // Waits for the prerequisites and executes all deferred commands. Never throws.
  void issue_all() noexcept {
    issue_while([] { return true; });
  }
  // The same, but stops when `needed` returns false: later commands can wait for something that the caller will do.
  // `needed` is called with the lock held, so it must not use this object.
  void issue_while(const std::function<bool()>& needed) noexcept;
  // Keeps an exception for rethrow(), unless there already is one.
  void keep_failure(std::exception_ptr failure) noexcept;
  // Throws the kept exception, the first of a command or a prerequisite, and clears it.
  void rethrow();

 private:
  struct Waiting {
    c10::intrusive_ptr<Prerequisite> prerequisite;
    std::optional<StoredCommand> stored;
  };

  void issue(Waiting waiting) noexcept;
  void update() noexcept; // sets any_; the caller holds the lock

  const Execute execute_;
  mutable std::mutex lock_; // never held while a command or a build runs
  std::condition_variable changed_;
  std::deque<Waiting> commands_;
  bool issuing_ = false; // the thread `issuer_` is executing commands
  std::thread::id issuer_;
  std::exception_ptr failure_;
  std::atomic<bool> any_{false};
};

} // namespace backplane
