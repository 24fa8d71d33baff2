// Host functions that a queue was given one after another, with nothing between them: it comes to all of them at once. To hand
// the host's part over to a queue, and to the thread that has OpenMP's team, takes as long as a small product does.
#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "devices/device.h"
#include "drivers/native_launcher.h"

namespace backplane {

class HostCalls {
 public:
  // Calls one of a device's functions with the threads that it wants, unless the process ends.
  static void call(const Device::HostFunction& function, const HostMemory& memory);

  // Whether this thread is in run(): it must not wait for the queue.
  static bool inside() noexcept;

  // False, and nothing is taken: run() is over, or as good as.
  bool add(Device::HostFunction&& function, HostMemory&& memory);

  // Calls the functions, also those that are added meanwhile. Once.
  void run();

 private:
  using Call = std::pair<Device::HostFunction, HostMemory>;

  // Nothing: there are no more, and none can be added.
  std::optional<Call> next();
  // Both return what next() does afterwards.
  std::optional<Call> run_one(Call one);
  std::optional<Call> run_piecewise(Call first); // and those that come next, as far as they are, too, together where they can be

  std::mutex lock_;
  std::deque<Call> calls_;
  bool over_ = false;
};

} // namespace backplane
