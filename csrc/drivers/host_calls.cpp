#include "drivers/host_calls.h"

#include <utility>
#include <vector>

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
          one = run_one(*std::move(one));
        } while (one && one->first.threads > 0); // others may wait for that thread
      });
    } else {
      one = run_one(*std::move(one));
    }
  }
}

std::optional<HostCalls::Call> HostCalls::run_one(Call one) {
  if (one.first.piecewise != nullptr) {
    return run_piecewise(std::move(one));
  }
  call(one.first, one.second);
  return next();
}

std::optional<HostCalls::Call> HostCalls::run_piecewise(Call first) {
  std::vector<Call> given;
  given.push_back(std::move(first));
  {
    // Without next(), after which none could be added while these run.
    const std::lock_guard<std::mutex> guard(lock_);
    while (!calls_.empty() && calls_.front().first.piecewise != nullptr &&
           calls_.front().first.threads == given[0].first.threads) {
      given.push_back(std::move(calls_.front()));
      calls_.pop_front();
    }
  }
  std::vector<c10::SmallVector<char*, 8>> memory; // of the calls
  std::vector<PiecewiseCall> calls;
  for (const auto& [function, seen] : given) {
    memory.push_back(seen.addresses());
  }
  for (size_t i = 0; i < given.size(); ++i) {
    calls.push_back({given[i].first.piecewise.get(), memory[i]});
  }
  run_with_threads(given[0].first.threads, [&] {
    const HostCall running;
    for (c10::ArrayRef<PiecewiseCall> rest = calls; !rest.empty() && running.may_run();) {
      const size_t count = count_together(rest);
      run_piece_by_piece(rest.slice(0, count));
      rest = rest.slice(count);
    }
  });
  return next();
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
