// The c10d Work of a collective: copies stand-ins, starts the engine, and tells when the results are in device memory.
#pragma once

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "devices/prerequisite.h"
#include "distributed/collective.h"
#include "distributed/failure.h"
#include "distributed/link.h"

namespace backplane {

class CollectiveWork final : public c10d::Work {
 public:
  // `blocks_host`: wait() makes the host wait, not the stream. `streams`: for copies, by device.
  CollectiveWork(
      const Member& member,
      Collective collective,
      uint64_t sequence_number,
      bool blocks_host,
      std::map<c10::DeviceIndex, c10::Stream> streams);

  // Notes the position of the devices' current streams: start() waits for it.
  void record_current_streams();
  // True if start() need not wait.
  bool can_start_now() const;
  // Copies to stand-ins and starts the engine. Its errors become this Work's. `link`: the modelled link, or null.
  void start(c10d::Backend& engine, Link* link) noexcept;
  // Ends the range in profiles. The issuing thread must call this: the collective can end after the profile.
  void end_recording();
  // Ends this Work with an error unless it has ended.
  void fail(std::exception_ptr error) noexcept;

  // Makes the current streams of the tensors' devices wait. With a timeout, or for a barrier, the host waits.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void abort() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  int sourceRank() const override;
  uint64_t getSequencenumber() const override;

 private:
  void start_part(CollectivePart& part, c10d::Backend& engine, Link* link);
  void finish_part(CollectivePart& part, std::exception_ptr error) noexcept;
  void end(std::exception_ptr error) noexcept;
  void copy(const CollectivePart& part, bool to_host) const;

  Collective collective_;
  const std::vector<c10::DeviceIndex> devices_;
  const bool blocks_host_;
  const std::map<c10::DeviceIndex, c10::Stream> streams_;
  const CollectiveId id_;
  std::vector<c10::Event> events_;
  std::function<void()> end_recording_;
  std::atomic<size_t> open_parts_;
  std::atomic<int> source_rank_{-1};
  std::mutex failure_lock_;
  std::exception_ptr failure_; // the first of a part
  std::atomic<bool> ended_{false};
  const c10::intrusive_ptr<HostSignal> signal_ = c10::make_intrusive<HostSignal>();
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The Work of several collectives that were issued between startCoalescing() and endCoalescing().
class CoalescedWork final : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

} // namespace backplane
