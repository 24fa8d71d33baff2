// The way by which commands enter a stream: captured while the stream is being captured, else profiled and given to the device.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <memory>

#include "devices/command.h"
#include "streams/capture.h"

namespace backplane {

class Submitter {
 public:
  explicit Submitter(c10::Stream stream);

  // `random` and `pinned` matter to a capture alone: numbers that differ in each replay, and the pinned memory of a copy.
  void submit(
      const Command& command, c10::ArrayRef<RandomNumber> random = {}, const c10::Storage& pinned = {}) const;

  const std::shared_ptr<Capture>& capture() const {
    return capture_;
  }

 private:
  const c10::Stream stream_;
  const std::shared_ptr<Capture> capture_; // null: the stream is not being captured
  const StreamHandle queue_;
};

// Once, on any stream.
inline void submit(c10::Stream stream, const Command& command) {
  Submitter(stream).submit(command);
}

// The function, whose exceptions go to the stream's next synchronization, and which is not called once the process ends.
std::shared_ptr<const HostFunction> guarded(std::shared_ptr<const HostFunction> function, c10::Stream stream);

// Gives the command to the device now. `queue` is the stream's. What a host callback throws is thrown by the stream's next
// synchronization (streams/device_errors.h).
void submit_now(c10::Stream stream, StreamHandle queue, const Command& command);

} // namespace backplane
