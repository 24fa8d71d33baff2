// Profiles: the commands that were submitted to devices, and the related activities of the host.
//
// Code that submits a command or makes the host wait holds a ProfiledCommand or a ProfiledRange meanwhile, which costs
// a load and a branch while no profile is active. c10/kineto_profiler.cpp exports the activities to PyTorch's profiler.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "devices/device.h"

namespace backplane {

struct Activity {
  enum class Kind : uint8_t {
    // Commands.
    Kernel,
    Library, // a library call
    HostStep, // a host callback
    Operator, // PyTorch's CPU kernel of an operator, on a device in host memory
    Copy,
    // Activities of the host only.
    Planning,
    Building,
    Waiting,
  };

  Kind kind;
  std::string name;
  c10::DeviceIndex device = -1; // -1: none
  StreamHandle stream = nullptr;
  size_t bytes = 0; // of a copy
  std::optional<LaunchSpec> spec;
  int32_t thread = 0; // the system's thread id
  uint64_t correlation = 0; // PyTorch's correlation id of the operator; 0: none
  uint64_t user_correlation = 0; // … and of the innermost record_function
  int64_t begun = 0, ended = 0; // on the host; nanoseconds since the Unix epoch
  std::unique_ptr<CommandTimer> timer;
  // Start and end on the device, on the host's clock. nullopt: unknown, for example because the command failed.
  std::optional<std::pair<int64_t, int64_t>> ran;
};

// The activities between start() and stop(). Only the profile that was started last is active.
class Profile {
 public:
  static bool is_active() noexcept {
    return is_active_.load(std::memory_order_relaxed);
  }
  // The active profile; nullptr: none.
  static std::shared_ptr<Profile> active();

  static std::shared_ptr<Profile> start();
  // Waits for the recorded commands and determines when they ran. Commands that other threads submit meanwhile are not
  // recorded.
  void stop();

  // PyTorch's correlation ids of the calling thread, innermost last.
  static void push_correlation(uint64_t number);
  static void pop_correlation();
  static void push_user_correlation(uint64_t number);
  static void pop_user_correlation();

  void add(Activity activity);

  // After stop().
  const std::vector<Activity>& activities() const {
    return activities_;
  }
  const std::vector<std::string>& errors() const {
    return errors_;
  }

 private:
  // A point in time on a device, and the same point on the host's clock.
  struct Base {
    EventHandle event;
    int64_t nanoseconds;
  };

  static Base base_of(Device& device, StreamHandle stream);

  static std::atomic<bool> is_active_;

  std::mutex lock_; // not held while a device is called
  bool is_stopped_ = false; // activities that are added later are dropped
  std::vector<Activity> activities_;
  std::vector<std::string> errors_;
};

// Records one command, which the calling thread submits during its lifetime.
class ProfiledCommand {
 public:
  ProfiledCommand(
      Activity::Kind kind, c10::DeviceIndex device, StreamHandle stream, std::string_view name, size_t bytes = 0) {
    if (C10_UNLIKELY(Profile::is_active())) {
      begin(kind, device, stream, name);
      activity_->bytes = bytes;
    }
  }
  // Events and fills are not recorded.
  ProfiledCommand(c10::DeviceIndex device, StreamHandle stream, const Command& command) {
    if (C10_UNLIKELY(Profile::is_active())) {
      begin(device, stream, command);
    }
  }
  ~ProfiledCommand() {
    if (C10_UNLIKELY(activity_ != nullptr)) {
      end();
    }
  }
  ProfiledCommand(const ProfiledCommand&) = delete;
  ProfiledCommand& operator=(const ProfiledCommand&) = delete;

 private:
  void begin(c10::DeviceIndex device, StreamHandle stream, const Command& command);
  void begin(Activity::Kind kind, c10::DeviceIndex device, StreamHandle stream, std::string_view name);
  void end() noexcept;

  std::unique_ptr<Activity> activity_; // nullptr: no profile is active
  int exceptions_ = 0; // in flight at the beginning
};

// Records an activity of the host during its lifetime.
class ProfiledRange {
 public:
  ProfiledRange(Activity::Kind kind, std::string_view what, std::string_view of = {}) {
    if (C10_UNLIKELY(Profile::is_active())) {
      begin(kind, what, of);
    }
  }
  ~ProfiledRange() {
    if (C10_UNLIKELY(activity_ != nullptr)) {
      end();
    }
  }
  ProfiledRange(const ProfiledRange&) = delete;
  ProfiledRange& operator=(const ProfiledRange&) = delete;

 private:
  void begin(Activity::Kind kind, std::string_view what, std::string_view of);
  void end() noexcept;

  std::unique_ptr<Activity> activity_;
};

} // namespace backplane
