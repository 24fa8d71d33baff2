#include "distributed/ordered_calls.h"

#include <utility>

namespace backplane {

void OrderedCalls::finish() {
  {
    std::lock_guard<std::mutex> guard(lock_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void OrderedCalls::add(std::function<void()> function) {
  std::lock_guard<std::mutex> guard(lock_);
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { serve(); });
  }
  functions_.push_back(std::move(function));
  changed_.notify_all();
}

bool OrderedCalls::empty() const {
  std::lock_guard<std::mutex> guard(lock_);
  return functions_.empty() && !calling_;
}

void OrderedCalls::serve() {
  std::unique_lock<std::mutex> guard(lock_);
  while (true) {
    changed_.wait(guard, [this] { return ending_ || !functions_.empty(); });
    if (functions_.empty()) {
      return;
    }
    auto function = std::move(functions_.front());
    functions_.pop_front();
    calling_ = true;
    guard.unlock();
    function();
    function = nullptr; // without the lock: it can own the last reference to a Work
    guard.lock();
    calling_ = false;
  }
}

} // namespace backplane
