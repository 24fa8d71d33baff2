// A thread that calls functions one after the other.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace backplane {

// Calls functions one after the other in a separate thread, which starts on first use.
class OrderedCalls {
 public:
  void finish(); // waits for all calls; must be called before the destructor
  void add(std::function<void()> function);
  bool empty() const; // no call is pending or running

 private:
  void serve();

  mutable std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> functions_;
  bool calling_ = false;
  bool ending_ = false;
  std::thread thread_;
};

} // namespace backplane
