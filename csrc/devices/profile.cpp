#include "devices/profile.h"

#include <ThreadUtil.h>
#include <c10/util/ApproximateClock.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <map>

#include "devices/compiled_kernel.h"
#include "devices/queue_function.h"

namespace backplane {
namespace {

std::mutex& active_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

std::shared_ptr<Profile>& active_profile() {
  static auto* profile = new std::shared_ptr<Profile>;
  return *profile;
}

thread_local std::vector<uint64_t> correlations, user_correlations;

uint64_t innermost(const std::vector<uint64_t>& numbers) {
  return numbers.empty() ? 0 : numbers.back();
}

void pop(std::vector<uint64_t>& numbers) {
  if (!numbers.empty()) { // empty if the profile started inside of the range
    numbers.pop_back();
  }
}

std::unique_ptr<Activity> begun(Activity::Kind kind, std::string name) {
  auto activity = std::make_unique<Activity>();
  activity->kind = kind;
  activity->name = std::move(name);
  activity->thread = libkineto::systemThreadId();
  activity->correlation = innermost(correlations);
  activity->user_correlation = innermost(user_correlations);
  activity->begun = c10::getTime();
  return activity;
}

void ended(std::unique_ptr<Activity> activity) noexcept {
  activity->ended = c10::getTime();
  try {
    if (const auto profile = Profile::active()) {
      profile->add(std::move(*activity));
    }
  } catch (const std::exception&) { // out of memory
  }
}

std::string message_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours != nullptr ? ours->what_without_backtrace() : error.what();
}

} // namespace

std::atomic<bool> Profile::is_active_{false};

std::shared_ptr<Profile> Profile::active() {
  const std::lock_guard<std::mutex> guard(active_lock());
  return active_profile();
}

std::shared_ptr<Profile> Profile::start() {
  auto profile = std::make_shared<Profile>();
  const std::lock_guard<std::mutex> guard(active_lock());
  active_profile() = profile;
  is_active_ = true;
  return profile;
}

void Profile::push_correlation(uint64_t number) {
  correlations.push_back(number);
}
void Profile::pop_correlation() {
  pop(correlations);
}
void Profile::push_user_correlation(uint64_t number) {
  user_correlations.push_back(number);
}
void Profile::pop_user_correlation() {
  pop(user_correlations);
}

void Profile::add(Activity activity) {
  const std::lock_guard<std::mutex> guard(lock_);
  if (!is_stopped_) { // another thread may have stopped it in the meantime
    activities_.push_back(std::move(activity));
  }
}

// An idle stream completes an event at about the time when it is recorded. The fastest of several tries is used.
Profile::Base Profile::base_of(Device& device, StreamHandle stream) {
  constexpr int kTries = 10;
  using Owned = std::unique_ptr<void, std::function<void(EventHandle)>>;
  const auto destroy = [&device](EventHandle event) { device.destroy_event(event); };
  Owned best(nullptr, destroy);
  int64_t closest = 0;
  int64_t nanoseconds = 0;
  const DeviceCall call(device);
  for (int i = 0; i < kTries; ++i) {
    Owned event(device.create_event(/*timing=*/true), destroy);
    const int64_t before = c10::getTime();
    device.submit(EventRecord{event.get()}, stream);
    device.synchronize_event(event.get());
    const int64_t after = c10::getTime();
    if (best == nullptr || after - before < closest) {
      closest = after - before;
      nanoseconds = before + closest / 2;
      best = std::move(event);
    }
  }
  return {best.release(), nanoseconds};
}

void Profile::stop() {
  {
    const std::lock_guard<std::mutex> guard(active_lock());
    if (active_profile().get() == this) {
      active_profile() = nullptr;
      is_active_ = false;
    }
  }
  std::vector<Activity> recorded;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    is_stopped_ = true;
    recorded.swap(activities_);
  }
  std::map<c10::DeviceIndex, std::optional<Base>> bases;
  const auto note = [&](c10::DeviceIndex index, const std::exception& error) {
    const std::string line = c10::str("bp:", static_cast<int>(index), ": ", message_of(error));
    if (std::find(errors_.begin(), errors_.end(), line) == errors_.end()) {
      errors_.push_back(line);
    }
  };
  for (Activity& activity : recorded) {
    if (activity.timer == nullptr) {
      continue;
    }
    Device& owner = device(activity.device);
    try {
      auto found = bases.find(activity.device);
      if (found == bases.end()) {
        found = bases.emplace(activity.device, std::nullopt).first; // if base_of throws, it is not tried again
        found->second = base_of(owner, activity.stream);
      }
      if (found->second.has_value()) {
        const auto at = [&](double milliseconds) {
          return found->second->nanoseconds + static_cast<int64_t>(milliseconds * 1e6);
        };
        if (const auto times = activity.timer->since(found->second->event)) {
          activity.ran = {at(times->first), at(times->second)};
        } else if (activity.kind == Activity::Kind::HostStep) {
          activity.ran = {activity.begun, activity.ended}; // the calling thread ran it immediately
        }
      }
    } catch (const std::exception& error) {
      note(activity.device, error);
    }
  }
  for (Activity& activity : recorded) {
    activity.timer.reset();
  }
  for (auto& [index, base] : bases) {
    if (base.has_value()) {
      device(index).destroy_event(base->event);
    }
  }
  const std::lock_guard<std::mutex> guard(lock_);
  activities_ = std::move(recorded);
}

void ProfiledCommand::begin(c10::DeviceIndex index, StreamHandle stream, const Command& command) {
  if (const auto* launch = std::get_if<KernelLaunch>(&command)) {
    begin(Activity::Kind::Kernel, index, stream, launch->kernel->entry());
    activity_->spec = launch->spec;
  } else if (const auto* call = std::get_if<LibraryCall>(&command)) {
    begin(Activity::Kind::Library, index, stream, call->function->name());
  } else if (const auto* copy = std::get_if<Copy>(&command)) {
    constexpr const char* kNames[] = {"Memcpy HtoD", "Memcpy DtoH", "Memcpy DtoD"}; // by CopyKind
    begin(Activity::Kind::Copy, index, stream, kNames[static_cast<size_t>(copy->kind)]);
    activity_->bytes = copy->bytes;
  } else if (const auto* callback = std::get_if<HostCallback>(&command)) {
    const bool is_operator = callback->function->is_operator();
    begin(is_operator ? Activity::Kind::Operator : Activity::Kind::HostStep, index, stream, callback->function->name());
  }
}

void ProfiledCommand::begin(Activity::Kind kind, c10::DeviceIndex index, StreamHandle stream, std::string_view name) {
  activity_ = begun(kind, std::string(name));
  activity_->device = index;
  activity_->stream = stream;
  exceptions_ = std::uncaught_exceptions();
  if (kind != Activity::Kind::Operator) {
    activity_->timer = device(index).time_commands(stream);
    activity_->begun = c10::getTime();
  }
}

void ProfiledCommand::end() noexcept {
  const bool failed = std::uncaught_exceptions() > exceptions_;
  if (activity_->timer != nullptr) {
    try {
      activity_->timer->stop();
    } catch (const std::exception&) {
      activity_->timer = nullptr; // the command reports its own error
    }
    if (failed) {
      activity_->timer = nullptr;
    }
  } else if (!failed) {
    activity_->ran = {activity_->begun, c10::getTime()};
  }
  ended(std::move(activity_));
}

void ProfiledRange::begin(Activity::Kind kind, std::string_view what, std::string_view of) {
  std::string name(what);
  if (!of.empty()) {
    name += ' ';
    name += of;
  }
  activity_ = begun(kind, std::move(name));
}

void ProfiledRange::end() noexcept {
  ended(std::move(activity_));
}

} // namespace backplane
