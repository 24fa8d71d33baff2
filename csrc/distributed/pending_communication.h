// A collective of a communication library from its issue to its end, apart from its c10d Work: it keeps the tensors
// alive, knows the events around it, and tells the streams that wait for it about a failure. Thread-safe.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "devices/communicator.h"
#include "devices/prerequisite.h"
#include "distributed/communication.h"
#include "distributed/failure.h"

namespace backplane {

class PendingCommunication {
 public:
  using Clock = std::chrono::steady_clock;

  // Notes the position of the device's current stream: submit() makes the communication wait for it.
  PendingCommunication(Communication communication, Member member, uint64_t number, std::chrono::milliseconds timeout);

  // Submits it to `stream`, whose native queue is `queue`. Throws if the library fails.
  void submit(Communicator& communicator, c10::Stream stream, uintptr_t queue);
  // It has been submitted, or has failed before.
  HostSignal& submitted() {
    return *submitted_;
  }
  // Ends it with an error, which the streams that wait for it throw. Does nothing if it has ended.
  void fail(const std::string& reason) noexcept;
  // The error; null if it has not failed.
  std::exception_ptr failure() const;
  // Whether it has completed or failed. Throws if the device is lost.
  bool is_over();
  bool is_late() const {
    return Clock::now() > deadline_;
  }

  // Makes the current stream of its device wait. Waits until it is submitted. Throws its error.
  void block_current_stream();
  // Makes the host wait until it is over, or for a time. Throws its error, and at the timeout.
  void wait_on_host(std::chrono::milliseconds timeout);

  const CollectiveId& id() const {
    return id_;
  }
  c10::DeviceIndex device() const {
    return issued_on_.device_index();
  }
  Clock::time_point deadline() const {
    return deadline_;
  }
  std::chrono::milliseconds timeout() const {
    return timeout_;
  }

 private:
  void release_tensors() noexcept;

  const CollectiveId id_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point deadline_;
  const c10::Stream issued_on_;
  const std::vector<CommunicationStep> steps_;
  c10::Event begin_{c10::kPrivateUse1};
  c10::Event end_{c10::kPrivateUse1};
  const c10::intrusive_ptr<HostSignal> submitted_ = c10::make_intrusive<HostSignal>();
  mutable std::mutex lock_; // the members below
  std::vector<at::Tensor> tensors_; // in use by the steps
  std::vector<c10::Stream> waiting_; // streams that wait for it
  std::exception_ptr failure_;
  bool is_over_ = false;
};

} // namespace backplane
