// Submits commands to a stream. If it is being captured, they are added to the capture; else they are profiled and
// submitted to the device.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <memory>

#include "devices/command.h"
#include "devices/prerequisite.h"
#include "streams/capture.h"

namespace backplane {

class Submitter {
 public:
  explicit Submitter(c10::Stream stream);

  // Only captures use `random` and `pinned`: numbers that differ in each replay, and the pinned memory of a copy.
  void submit(const Command& command, c10::ArrayRef<RandomNumber> random = {}, const c10::Storage& pinned = {}) const;

  const std::shared_ptr<Capture>& capture() const {
    return capture_;
  }

 private:
  const c10::Stream stream_;
  const std::shared_ptr<Capture> capture_; // nullptr: the stream is not being captured
  const StreamHandle queue_;
};

// Submits one command.
inline void submit(c10::Stream stream, const Command& command) {
  Submitter(stream).submit(command);
}

// Wraps the function: the stream's next synchronization throws its exceptions, and it does not run while the process
// exits.
std::shared_ptr<const HostFunction> guarded(std::shared_ptr<const HostFunction> function, c10::Stream stream);

// Submits the command to the device, without capture. `queue` is the stream's queue. The stream's next synchronization
// throws exceptions of host callbacks (streams/device_errors.h).
void submit_now(c10::Stream stream, StreamHandle queue, const Command& command);

// Makes the stream wait for a signal of the host. If the stream cannot, the calling thread waits. An error of the
// signal is thrown here, or by the stream's next use or synchronization. Throws if the stream is being captured.
void wait_for_signal(const c10::intrusive_ptr<HostSignal>& signal, c10::Stream stream);

} // namespace backplane
