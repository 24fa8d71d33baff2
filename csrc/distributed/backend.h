// The c10d backend of bp: runs each collective on an engine for CPU tensors (collective.h).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "distributed/collective_work.h"
#include "distributed/ordered_calls.h"

namespace backplane {

// Collectives start in the order of the calls, as on every rank. A collective starts in the calling thread if nothing
// has to be waited for, else in the thread of `calls_`, when the devices' current streams have reached it.
class DistributedBackend final : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;

  // `engine`: a backend for CPU tensors. `link`: a modelled link, or null.
  DistributedBackend(c10::intrusive_ptr<c10d::Backend> engine, std::unique_ptr<Link> link);
  ~DistributedBackend() override;

  const std::string getBackendName() const override {
    return "backplane";
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
  Work issue(Collective collective, bool blocks_host = false);
  Work allgather_uneven(const Tensors& outputs, const Tensors& inputs, const c10d::AllgatherOptions& options);
  Work reduce_scatter_tensors(
      c10d::OpType type,
      const char* name,
      Tensors& outputs,
      Tensors& inputs,
      const c10d::ReduceScatterOptions& options);
  c10::Stream copy_stream(c10::DeviceIndex index);
  void forget_ended();

  c10::intrusive_ptr<c10d::Backend> engine_;
  const std::unique_ptr<Link> link_;
  std::mutex lock_; // the members below
  std::map<c10::DeviceIndex, c10::Stream> copy_streams_;
  std::vector<c10::intrusive_ptr<CollectiveWork>> open_; // not known to have ended
  std::vector<Work> coalesced_;
  bool coalescing_ = false;
  bool aborted_ = false;
  uint64_t sequence_number_ = 0;
  OrderedCalls calls_;
};

} // namespace backplane
