#include "devices/prerequisite.h"

#include <utility>

namespace backplane {

void HostSignal::set(std::exception_ptr failure) noexcept {
  std::vector<std::function<void()>> functions;
  {
    std::lock_guard<std::mutex> guard(lock_);
    if (set_) {
      return;
    }
    set_ = true;
    failure_ = std::move(failure);
    functions.swap(functions_);
  }
  changed_.notify_all();
  for (const auto& function : functions) {
    function();
  }
}

void HostSignal::when_set(std::function<void()> function) {
  {
    std::lock_guard<std::mutex> guard(lock_);
    if (!set_) {
      functions_.push_back(std::move(function));
      return;
    }
  }
  function();
}

bool HostSignal::is_over() const noexcept {
  std::lock_guard<std::mutex> guard(lock_);
  return set_;
}

void HostSignal::check() const {
  if (failure_ != nullptr) { // not written any more
    std::rethrow_exception(failure_);
  }
}

void HostSignal::wait() noexcept {
  std::unique_lock<std::mutex> guard(lock_);
  changed_.wait(guard, [this] { return set_; });
}

} // namespace backplane
