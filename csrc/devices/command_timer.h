// Measures when commands ran, for profiles.
#pragma once

#include <optional>
#include <utility>

namespace backplane {

// Created by Device::time_commands.
class CommandTimer {
 public:
  virtual ~CommandTimer() = default;
  // Must be called in the thread that created the timer. Commands submitted afterwards are not timed.
  virtual void stop() = 0;
  // Waits for the last command. Returns the milliseconds from `base`, a completed event with timing, to the start of
  // the first command and to the end of the last one; nullopt if the times are unknown, as without commands or after an
  // error.
  virtual std::optional<std::pair<double, double>> since(void* base) = 0;
};

} // namespace backplane
