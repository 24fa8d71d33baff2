#include "drivers/kernel_build.h"

#include <utility>

#include "devices/device.h"

namespace backplane {

// --- one build -------------------------------------------------------------------------------------------------------

void KernelBuild::check() const {
  if (failure_ != nullptr) {
    std::rethrow_exception(failure_);
  }
}

void KernelBuild::run() noexcept {
  auto expected = State::Requested;
  if (!state_.compare_exchange_strong(expected, State::Running)) {
    return;
  }
  try {
    build();
  } catch (...) {
    failure_ = std::current_exception();
  }
  {
    std::lock_guard<std::mutex> guard(lock_);
    state_.store(failure_ == nullptr ? State::Built : State::Failed, std::memory_order_release);
  }
  changed_.notify_all();
  finished();
}

void KernelBuild::wait() noexcept {
  run();
  std::unique_lock<std::mutex> guard(lock_);
  changed_.wait(guard, [this] { return is_over(); });
}

// --- the commands of one stream --------------------------------------------------------------------------------------

bool DeferredCommands::is_waiting() const {
  std::lock_guard<std::mutex> guard(lock_);
  return issuing_ || !commands_.empty();
}

void DeferredCommands::submit(c10::intrusive_ptr<Prerequisite> prerequisite, std::optional<StoredCommand> command) {
  bool many = false;
  {
    std::lock_guard<std::mutex> guard(lock_);
    commands_.push_back({std::move(prerequisite), std::move(command)});
    many = commands_.size() >= kMaxWaiting;
    update();
  }
  if (C10_UNLIKELY(many)) {
    issue_all();
  } else {
    issue_ready();
  }
}

void DeferredCommands::issue_ready() noexcept {
  std::unique_lock<std::mutex> guard(lock_);
  if (issuing_) {
    return; // another thread executes commands, and sees the ready ones; or this thread, in an outer call
  }
  issuing_ = true;
  issuer_ = std::this_thread::get_id();
  while (!commands_.empty() && (!commands_.front().prerequisite || commands_.front().prerequisite->is_over())) {
    Waiting next = std::move(commands_.front());
    commands_.pop_front();
    guard.unlock();
    issue(std::move(next));
    guard.lock();
  }
  issuing_ = false;
  issuer_ = {};
  update();
  guard.unlock();
  changed_.notify_all();
}

void DeferredCommands::issue_while(const std::function<bool()>& needed) noexcept {
  if (!any()) {
    return;
  }
  const GilReleased released;
  for (;;) {
    issue_ready();
    // Under the lock: otherwise another thread could then execute the command that the caller needs, and the first one
    // left could wait for something that the caller will do.
    std::unique_lock<std::mutex> guard(lock_);
    if (!needed()) {
      return;
    }
    if (issuing_) {
      if (issuer_ == std::this_thread::get_id()) {
        return; // called from within a command: later commands must execute after it
      }
      changed_.wait(guard, [this] { return !issuing_; });
      continue;
    }
    if (commands_.empty()) {
      return;
    }
    const auto prerequisite = commands_.front().prerequisite;
    guard.unlock();
    if (prerequisite) {
      prerequisite->wait();
    }
  }
}

void DeferredCommands::rethrow() {
  std::exception_ptr failure;
  {
    std::lock_guard<std::mutex> guard(lock_);
    failure = std::exchange(failure_, nullptr);
    update();
  }
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
}

void DeferredCommands::issue(Waiting waiting) noexcept {
  try {
    if (waiting.prerequisite) {
      waiting.prerequisite->check();
    }
    if (waiting.stored.has_value()) {
      execute_(waiting.stored->command());
    }
  } catch (...) {
    keep_failure(std::current_exception());
  }
}

void DeferredCommands::keep_failure(std::exception_ptr failure) noexcept {
  std::lock_guard<std::mutex> guard(lock_);
  if (failure_ == nullptr) {
    failure_ = std::move(failure);
  }
  update();
}

void DeferredCommands::update() noexcept {
  any_.store(issuing_ || !commands_.empty() || failure_ != nullptr, std::memory_order_release);
}

} // namespace backplane
