#include "drivers/host_calls.h"

#include <utility>

#include "devices/ending.h"
#include "devices/openmp.h"

namespace backplane {
namespace {

thread_local bool running = false;

// This thread runs what a queue was given, or lets go of it, while this lives.
class Running {
 public:
  Running() : before_(std::exchange(running, true)) {}
  ~Running() {
    running = before_;
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  const bool before_;
};

} // namespace

bool HostCalls::inside() noexcept {
  return running;
}

void HostCalls::call(const Device::HostFunction& function, const HostMemory& memory) {
  run_with_threads(function.threads, [&] {
    if (const HostCall running; running.may_run()) {
      function.call(memory.addresses().data());
    }
  });
}

bool HostCalls::add(Device::HostFunction&& function, HostMemory&& memory) {
  const std::lock_guard<std::mutex> guard(lock_);
  if (over_) {
    return false;
  }
  calls_.emplace_back(std::move(function), std::move(memory));
  return true;
}

void HostCalls::run() {
  const Running here;
  std::optional<Call> one = next();
  while (one) {
    if (one->first.threads > 1) { // what comes next need not be handed over to the team's thread again
      run_with_team(one->first.threads, [&] {
        const Running there;
        do {
          call(one->first, one->second);
          one = next();
        } while (one && one->first.threads > 0); // others may wait for that thread
      });
    } else {
      call(one->first, one->second);
      one = next();
    }
  }
}

std::optional<HostCalls::Call> HostCalls::next() {
  const std::lock_guard<std::mutex> guard(lock_);
  if (calls_.empty()) {
    over_ = true;
    return std::nullopt;
  }
  Call one = std::move(calls_.front());
  calls_.pop_front();
  return one;
}

} // namespace backplane
