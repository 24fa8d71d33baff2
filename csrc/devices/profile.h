// What a profile records of bp: the commands that devices are given, and what the host does for them.
//
// Whoever gives a device a command, or lets the host wait, holds a ProfiledCommand or a ProfiledRange meanwhile. Where no
// profile is taken, that costs a load and a branch. c10/kineto_profiler.cpp hands to PyTorch's profiler what was recorded.
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
    Library, // a function of a library that gives the queue work itself
    HostStep, // the host's part in a stream's work
    Operator, // an operator of PyTorch's CPU, on a device whose memory the host computes on
    Copy,
    // Of the host alone.
    Planning,
    Building,
    Waiting,
  };

  Kind kind;
  std::string name;
  c10::DeviceIndex device = -1; // -1: none
  StreamHandle stream = nullptr;
  size_t bytes = 0; // that are copied
  std::optional<LaunchSpec> spec;
  int32_t thread = 0; // as the system numbers them
  uint64_t correlation = 0; // PyTorch's number of the operator that it was done for; 0: none
  uint64_t user_correlation = 0; // … and of the innermost record_function
  int64_t begun = 0, ended = 0; // on the host; nanoseconds since 1970
  std::unique_ptr<CommandTimer> timer;
  // When the device was at it. Nothing: it cannot be told, as where a command failed.
  std::optional<std::pair<int64_t, int64_t>> ran;
};

// What is recorded between start() and stop(). One at a time is active, the one that was started last.
class Profile {
 public:
  static bool is_active() noexcept {
    return is_active_.load(std::memory_order_relaxed);
  }
  // The profile that is being taken; nullptr: none.
  static std::shared_ptr<Profile> active();

  static std::shared_ptr<Profile> start();
  // Waits for the commands that were recorded, and finds out when they ran. Those that other threads give meanwhile are not
  // in it.
  void stop();

  // PyTorch's numbers of what the calling thread is doing, innermost last.
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
  // A moment on a device, and when the host had it.
  struct Base {
    EventHandle event;
    int64_t nanoseconds;
  };

  static Base base_of(Device& device, StreamHandle stream);

  static std::atomic<bool> is_active_;

  std::mutex lock_; // not held while a device is called
  bool is_stopped_ = false; // what threads add later is left out
  std::vector<Activity> activities_;
  std::vector<std::string> errors_;
};

// One command that the calling thread gives to a stream while this lives.
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

  std::unique_ptr<Activity> activity_; // null: no profile is taken
  int exceptions_ = 0; // on their way when it began
};

// What the host does while this lives.
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
