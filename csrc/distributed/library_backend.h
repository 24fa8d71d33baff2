// The c10d backend of bp for devices with a communication library (devices/communicator.h), such as NCCL.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "devices/communicator.h"
#include "distributed/channel.h"
#include "distributed/communication.h"

namespace backplane {

// A group has one device per rank, that of its first tensors. Its ranks compare their devices then, through the store.
// If two are on the same hardware, which the library refuses, or one has no library, the group uses `staged`, a
// DistributedBackend, instead.
//
// Collectives use a communicator of all ranks, and so do coalesced sends and receives. Others use one of the two ranks.
// A thread watches them for timeouts and errors of the library. The first failure ends the group.
class LibraryBackend final : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using Libraries = std::map<c10::DeviceIndex, std::shared_ptr<CommunicationLibrary>>;

  LibraryBackend(
      c10::intrusive_ptr<c10d::Backend> staged,
      c10::intrusive_ptr<c10d::Store> store,
      Libraries libraries,
      std::chrono::milliseconds timeout);
  ~LibraryBackend() override;

  const std::string getBackendName() const override {
    return staged_->getBackendName();
  }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Work allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Work allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Work gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  Work reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  Work reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Work send(Tensors& tensors, int destination, int tag) override;
  Work recv(Tensors& tensors, int source, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;
  Work barrier(const c10d::BarrierOptions& options) override;

  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override;
  Work endCoalescing() override;

  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

 private:
  using Deadline = Communicator::Deadline;

  bool is_staged(const Tensors& tensors);
  bool is_pair_staged(const Tensors& tensors, int peer);
  bool is_coalescing();
  bool is_sending_staged(const Tensors& tensors, int peer);
  void publish_device(c10::DeviceIndex index);
  bool decide(const std::vector<int>& ranks);
  bool decided(std::optional<bool>& decision, const Tensors& tensors, const std::vector<int>& ranks);
  std::chrono::milliseconds timeout();
  const std::string& place_of(int rank, Deadline deadline);
  std::vector<uint8_t> read(const std::string& key, Deadline deadline, const std::string& lacking);
  std::shared_ptr<Channel> channel_to(int peer);
  std::unique_ptr<Communicator> join(int peer, Deadline deadline);
  Work issue(Communication communication, int peer);
  Work issue_to_group(Communication communication);
  Work issue_to_pair(Communication communication, int peer, CommunicationStep::Kind kind, const at::Tensor& tensor);
  std::vector<std::shared_ptr<Channel>> channels();
  void watch();
  bool check(Channel& channel);
  void fail(const std::string& reason, const PendingCommunication* first);
  void end_watch();

  const c10::intrusive_ptr<c10d::Backend> staged_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const Libraries libraries_;
  std::vector<int> all_ranks_;
  std::mutex places_lock_; // the members below; held while the devices are compared
  std::vector<std::optional<std::string>> places_; // of the ranks, as far as known
  std::optional<bool> is_staged_; // not set before the first collective
  std::map<int, std::optional<bool>> are_pairs_staged_; // likewise, for sends and receives, by the other rank
  std::optional<c10::DeviceIndex> device_; // of this rank
  std::mutex lock_; // the members below
  std::condition_variable changed_;
  std::map<int, std::shared_ptr<Channel>> channels_; // by peer; kAll: of all ranks
  std::chrono::milliseconds timeout_;
  std::optional<Communication> coalesced_; // set between startCoalescing() and endCoalescing()
  bool coalesces_staged_ = false;
  std::string failure_; // why the group has ended; empty before
  std::atomic<bool> has_failed_{false};
  uint64_t number_ = 0; // of the next collective
  bool has_open_ = false; // communications for the watch
  bool ending_ = false;
  std::thread watch_;
};

} // namespace backplane
