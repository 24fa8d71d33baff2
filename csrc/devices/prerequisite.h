// Something outside the queues that commands of a stream can wait for: a kernel build, or a signal from the host.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

namespace backplane {

class Prerequisite : public c10::intrusive_ptr_target {
 public:
  // It has succeeded or failed.
  virtual bool is_over() const noexcept = 0;
  // Throws the error if it failed. Requires is_over().
  virtual void check() const = 0;
  // Waits until is_over(). The caller does not hold the GIL.
  virtual void wait() noexcept = 0;
};

// A signal that the host sets once, for streams that wait for work of the host, such as communication.
class HostSignal final : public Prerequisite {
 public:
  // `failure`: the error of the work, or null. Calls the functions of when_set(). Does nothing if the signal is set.
  void set(std::exception_ptr failure = nullptr) noexcept;
  // Calls the function when the signal is set, in the thread that sets it; immediately if it is set.
  void when_set(std::function<void()> function);

  bool is_over() const noexcept override;
  void check() const override;
  void wait() noexcept override;
  // Waits until the deadline. Returns is_over().
  template <typename TimePoint>
  bool wait_until(TimePoint deadline) {
    std::unique_lock<std::mutex> guard(lock_);
    return changed_.wait_until(guard, deadline, [this] { return set_; });
  }

 private:
  mutable std::mutex lock_;
  std::condition_variable changed_;
  bool set_ = false;
  std::exception_ptr failure_;
  std::vector<std::function<void()>> functions_;
};

} // namespace backplane
