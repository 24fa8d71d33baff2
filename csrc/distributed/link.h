// A modelled link between simulated devices: transfers end no earlier than a link with this delay and speed allows.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace backplane {

class Link {
 public:
  using Clock = std::chrono::steady_clock;

  // `delay`: of each transfer, in seconds. `speed`: bytes per second; 0: unlimited.
  Link(double delay, double speed) : delay_(delay), speed_(speed) {}

  // Reserves the link for a transfer of `bytes` bytes and returns when it ends. Transfers follow each other.
  Clock::time_point reserve(int64_t bytes) {
    const auto in_clock = [](double seconds) {
      return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    };
    std::lock_guard<std::mutex> guard(lock_);
    free_ = std::max(free_, Clock::now()) + in_clock(speed_ > 0 ? static_cast<double>(bytes) / speed_ : 0);
    return free_ + in_clock(delay_);
  }

 private:
  const double delay_;
  const double speed_;
  std::mutex lock_;
  Clock::time_point free_; // the end of the last transfer
};

} // namespace backplane
