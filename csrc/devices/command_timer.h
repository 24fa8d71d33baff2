// When commands ran that a device was given, for profiles.
#pragma once

#include <optional>
#include <utility>

namespace backplane {

// Made by Device::time_commands.
class CommandTimer {
 public:
  virtual ~CommandTimer() = default;
  // To be called in the thread that made it: what it gives to the stream from here on does not count.
  virtual void stop() = 0;
  // Milliseconds from `base`, an event that was recorded with timing and is reached, to when the first command began and to
  // when the last one ended, for which it waits. Nothing where there was no command, or one failed.
  virtual std::optional<std::pair<double, double>> since(void* base) = 0;
};

} // namespace backplane
