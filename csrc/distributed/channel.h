// A communicator of a process group, with the stream on which it works.
#pragma once

#include <c10/core/Stream.h>

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "devices/communicator.h"
#include "distributed/ordered_calls.h"
#include "distributed/pending_communication.h"

namespace backplane {

// Communications are submitted in the order of the calls: in the calling thread, except that a thread of the channel
// submits the first ones, after it has joined the group. So calls do not wait for the other ranks.
class Channel {
 public:
  using Pending = std::shared_ptr<PendingCommunication>;
  using Deadline = Communicator::Deadline;
  // Returns when the group can be joined: all ranks must know its identifier.
  using Join = std::function<std::unique_ptr<Communicator>(Deadline)>;
  // Called if a communication cannot be submitted.
  using Failed = std::function<void(const Pending& communication, const std::exception_ptr& error)>;

  Channel(c10::DeviceIndex index, Join join, Failed failed);
  ~Channel();

  void add(const Pending& communication);
  // The communications that are not over. Forgets the others. Throws if the device is lost.
  std::vector<Pending> open();
  // The library's error; empty if there is none.
  std::string failure();
  // Ends the open communications with an error, and refuses further ones.
  void fail(const std::string& reason) noexcept;
  // Waits for the channel's thread, which must not call this. After fail() it ends early.
  void end_calls();
  // Leaves the group. Must be called when no communication is open. Throws if the library fails.
  void finish(Deadline deadline);

 private:
  void abort() noexcept;
  void submit(const Pending& communication);
  void join_group(Deadline deadline);
  std::shared_ptr<Communicator> communicator();

  const Join join_;
  const Failed failed_;
  const c10::Stream stream_;
  const uintptr_t queue_;
  std::mutex lock_; // the members below
  std::shared_ptr<Communicator> communicator_; // null before it has joined
  std::vector<Pending> open_;
  bool has_begun_ = false;
  bool is_aborted_ = false;
  OrderedCalls calls_;
};

} // namespace backplane
