#include "distributed/backend.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "compat.h"
#include "devices/device.h"
#include "streams/capture.h"
#include "streams/stream.h"

namespace backplane {
namespace {

using c10d::OpType;
using c10d::ReduceOp;
using Tensors = DistributedBackend::Tensors;

// The copies of a part overlap with the communication of the others.
constexpr int64_t kPartBytes = int64_t{8} << 20;

// Engines do not scale. AVG is computed as SUM, which `finish` divides, and PREMUL_SUM as SUM of multiplied tensors.
ReduceOp engine_operation(const ReduceOp& operation) {
  const bool scales = operation == ReduceOp::AVG || operation == ReduceOp::PREMUL_SUM;
  return scales ? ReduceOp(ReduceOp::SUM) : operation;
}

void check_floating_point(const Tensors& tensors, const char* operation) {
  for (const auto& tensor : tensors) {
    TORCH_CHECK_VALUE(
        tensor.is_floating_point(), operation, " needs tensors of a floating-point dtype, not ", tensor.scalar_type());
  }
}

std::function<void()> division(const ReduceOp& operation, Tensors results, int size) {
  if (operation != ReduceOp::AVG) {
    return {};
  }
  check_floating_point(results, "ReduceOp.AVG");
  return [results = std::move(results), size] {
    for (const auto& result : results) {
      result.div_(size);
    }
  };
}

// The factor of PREMUL_SUM as a tensor without dimensions, which can be read in `start`. Undefined for other
// operations.
at::Tensor factor_of(CollectivePart& part, const ReduceOp& operation, const Tensors& tensors) {
  if (operation != ReduceOp::PREMUL_SUM) {
    return {};
  }
  check_floating_point(tensors, "ReduceOp.PREMUL_SUM");
  const auto& factor = static_cast<const c10d::NCCLPreMulSumSupplement&>(*operation.supplement_);
  return factor.tensor_factor.defined() ? part.stage(factor.tensor_factor, Access::Read).squeeze()
                                        : at::scalar_tensor(factor.double_factor, at::kDouble);
}

void multiply(const Tensors& tensors, const at::Tensor& factor) {
  for (const auto& tensor : tensors) {
    if (factor.defined()) {
      tensor.mul_(factor);
    }
  }
}

at::Tensor multiplied(const at::Tensor& tensor, const at::Tensor& factor) {
  return factor.defined() ? tensor.mul(factor) : tensor;
}

template <typename Element>
std::vector<Element> multiplied(std::vector<Element> elements, const at::Tensor& factor) {
  for (auto& element : elements) {
    element = multiplied(element, factor);
  }
  return elements;
}

// The pieces of a dense tensor, as one part each. They depend on its size only, so that all ranks agree on them, also
// if their devices differ.
Tensors pieces_of(const at::Tensor& tensor) {
  if (static_cast<int64_t>(tensor.nbytes()) <= kPartBytes || !tensor.is_non_overlapping_and_dense()) {
    return {tensor}; // stage() refuses one that is not dense
  }
  return tensor.detach().as_strided({tensor.numel()}, {1}).split(kPartBytes / static_cast<int64_t>(tensor.itemsize()));
}

void check_one(const Tensors& tensors, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == 1, name, " takes one tensor per rank, but got ", tensors.size());
  TORCH_CHECK_VALUE(
      tensors[0].device().is_privateuseone(), "the backplane backend takes bp tensors, but got one on ",
      tensors[0].device());
}

// A collective in which the engine only moves data from `inputs` to `outputs`: tensors, lists, or lists of lists.
template <typename Outputs, typename Inputs, typename Call>
Collective moving(OpType type, const char* name, Outputs& outputs, Inputs& inputs, Call call) {
  Collective collective{type, name, {}, flattened(outputs), flattened(inputs)};
  auto& part = collective.parts.emplace_back();
  part.start = [to = movable(part.stage(outputs, Access::Write)), from = movable(part.stage(inputs, Access::Read)),
                call](c10d::Backend& engine) mutable { return call(engine, to, from); };
  return collective;
}

// Gloo compares shapes. CUDA's rule is that the output has the elements of all inputs: (2, 3) or (1, 6) for two of (3).
DistributedBackend::Work gather_flat(
    c10d::Backend& engine, const at::Tensor& to, const at::Tensor& from, const c10d::AllgatherOptions& options) {
  at::Tensor output = flat(to), input = flat(from);
  return engine._allgather_base(output, input, options);
}

bool have_one_size(const Tensors& tensors) {
  return std::all_of(
      tensors.begin(), tensors.end(), [&](const at::Tensor& one) { return one.numel() == tensors.front().numel(); });
}

// A part that reduces `inputs` into `outputs`.
template <typename Outputs, typename Inputs, typename Call>
void add_reduction(
    Collective& collective, Outputs& outputs, Inputs& inputs, c10d::ReduceScatterOptions options, int size, Call call) {
  auto& part = collective.parts.emplace_back();
  auto to = part.stage(outputs, Access::Write);
  auto from = part.stage(inputs, Access::Read);
  const auto factor = factor_of(part, options.reduceOp, flattened(from));
  part.finish = division(options.reduceOp, flattened(to), size);
  options.reduceOp = engine_operation(options.reduceOp);
  part.start = [to, from, factor, options, call](c10d::Backend& engine) mutable {
    from = multiplied(from, factor);
    return call(engine, to, from, options);
  };
}

} // namespace

// --- the backend -----------------------------------------------------------------------------------------------------

DistributedBackend::DistributedBackend(c10::intrusive_ptr<c10d::Backend> engine, std::unique_ptr<Link> link)
    : Backend(engine->getRank(), engine->getSize()), engine_(std::move(engine)), link_(std::move(link)) {
  init();
}

// The engine waits for its threads. They can need the GIL, to release tensors that Python knows.
DistributedBackend::~DistributedBackend() {
  const GilReleased released;
  calls_.finish();
  engine_.reset();
}

c10::intrusive_ptr<c10d::Backend::Options> DistributedBackend::getBackendOptions() {
  return engine_->getBackendOptions();
}

void DistributedBackend::setTimeout(std::chrono::milliseconds timeout) {
  engine_->setTimeout(timeout);
}

c10::Stream DistributedBackend::copy_stream(c10::DeviceIndex index) {
  const auto found = copy_streams_.find(index);
  return found != copy_streams_.end()
      ? found->second
      : copy_streams_.emplace(index, pool_stream(index, kGreatestPriority)).first->second;
}

void DistributedBackend::forget_ended() {
  open_.erase(
      std::remove_if(open_.begin(), open_.end(), [](const auto& work) { return work->isCompleted(); }), open_.end());
}

DistributedBackend::Work DistributedBackend::issue(Collective collective, bool blocks_host) {
  const auto devices = collective.devices();
  for (const auto index : devices) {
    if (const auto capture = Capture::of(current_stream(index)); C10_UNLIKELY(capture != nullptr)) {
      capture->refuse("collectives of torch.distributed cannot be captured");
    }
  }
  c10::intrusive_ptr<CollectiveWork> work;
  {
    std::lock_guard<std::mutex> guard(lock_);
    TORCH_CHECK_WITH(DistBackendError, !aborted_, "the process group '", getGroupDesc(), "' was aborted");
    std::map<c10::DeviceIndex, c10::Stream> streams;
    for (const auto index : devices) {
      streams.emplace(index, copy_stream(index));
    }
    work = c10::make_intrusive<CollectiveWork>(
        Member{getRank(), getSize(), getGroupDesc()}, std::move(collective), sequence_number_++, blocks_host,
        std::move(streams));
    forget_ended();
    open_.push_back(work);
    if (coalescing_) {
      coalesced_.push_back(work);
    }
  }
  const GilReleased released;
  if (calls_.empty() && work->can_start_now()) {
    work->start(*engine_, link_.get());
  } else {
    work->record_current_streams();
    calls_.add([this, work] { work->start(*engine_, link_.get()); });
  }
  work->end_recording();
  return work;
}

DistributedBackend::Work DistributedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_one(tensors, "broadcast");
  const bool sends = options.rootRank == getRank();
  Collective collective{OpType::BROADCAST, "broadcast", {}, tensors};
  for (const auto& piece : pieces_of(tensors[0])) {
    auto& part = collective.parts.emplace_back();
    Tensors hosts{movable(part.stage(piece, sends ? Access::Read : Access::Write))};
    part.start = [hosts, options](Backend& engine) mutable { return engine.broadcast(hosts, options); };
  }
  return issue(std::move(collective));
}

DistributedBackend::Work DistributedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check_one(tensors, "all_reduce");
  Collective collective{OpType::ALLREDUCE, "all_reduce", {}, tensors};
  for (const auto& piece : pieces_of(tensors[0])) {
    auto& part = collective.parts.emplace_back();
    Tensors hosts{part.stage(piece, Access::ReadWrite)};
    part.finish = division(options.reduceOp, hosts, getSize());
    part.start = [hosts, factor = factor_of(part, options.reduceOp, hosts), given = options](Backend& engine) mutable {
      given.reduceOp = engine_operation(given.reduceOp);
      multiply(hosts, factor);
      return engine.allreduce(hosts, given);
    };
  }
  return issue(std::move(collective));
}

DistributedBackend::Work DistributedBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  Collective collective{OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", {}, tensors};
  auto& part = collective.parts.emplace_back();
  Tensors hosts = part.stage(tensors, Access::ReadWrite);
  part.finish = division(options.reduceOp, hosts, getSize());
  part.start = [hosts, factor = factor_of(part, options.reduceOp, hosts), given = options](Backend& engine) mutable {
    given.reduceOp = engine_operation(given.reduceOp);
    multiply(hosts, factor);
    return engine.allreduce_coalesced(hosts, given);
  };
  return issue(std::move(collective));
}

DistributedBackend::Work DistributedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_one(tensors, "reduce");
  const bool receives = options.rootRank == getRank();
  Collective collective{OpType::REDUCE, "reduce", {}, tensors};
  for (const auto& piece : pieces_of(tensors[0])) {
    auto& part = collective.parts.emplace_back();
    // Gloo uses the tensors of other ranks as its workspace, and CUDA leaves them alone.
    Tensors hosts{part.stage(piece, receives ? Access::ReadWrite : Access::Read)};
    const bool shares = part.tensors.back().shares_memory();
    auto divide = division(options.reduceOp, hosts, getSize()); // checks the dtype on all ranks
    part.finish = receives ? std::move(divide) : nullptr;
    const auto factor = factor_of(part, options.reduceOp, hosts);
    part.start = [hosts, receives, shares, factor, given = options](Backend& engine) mutable {
      given.reduceOp = engine_operation(given.reduceOp);
      if (shares && !receives) {
        hosts[0] = hosts[0].clone();
      }
      multiply(hosts, factor);
      return engine.reduce(hosts, given);
    };
  }
  return issue(std::move(collective));
}

DistributedBackend::Work DistributedBackend::allgather(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  if (outputs.size() == 1 && !have_one_size(outputs[0])) {
    return allgather_uneven(outputs[0], inputs, options);
  }
  return issue(moving(
      OpType::ALLGATHER, "all_gather", outputs, inputs,
      [options](Backend& engine, TensorLists& to, Tensors& from) { return engine.allgather(to, from, options); }));
}

// Engines gather tensors of one size, so each rank broadcasts its tensor. All ranks know all sizes.
DistributedBackend::Work DistributedBackend::allgather_uneven(
    const Tensors& outputs, const Tensors& inputs, const c10d::AllgatherOptions& options) {
  check_one(inputs, "all_gather");
  TORCH_CHECK_VALUE(
      static_cast<int>(outputs.size()) == getSize(), "all_gather got ", outputs.size(), " outputs for ", getSize(),
      " ranks");
  TORCH_CHECK_VALUE(
      outputs[getRank()].sizes() == inputs[0].sizes(), "all_gather got an output of sizes ", outputs[getRank()].sizes(),
      " for the input of this rank, which has sizes ", inputs[0].sizes());
  Collective collective{OpType::ALLGATHER, "all_gather", {}, outputs, inputs};
  for (int root = 0; root < getSize(); ++root) {
    auto& part = collective.parts.emplace_back();
    Tensors to{movable(part.stage(outputs[root], Access::Write))};
    const at::Tensor from = root == getRank() ? movable(part.stage(inputs[0], Access::Read)) : at::Tensor();
    part.start = [to, from, root, options](Backend& engine) mutable {
      if (from.defined()) {
        to[0].copy_(from);
      }
      c10d::BroadcastOptions given;
      given.rootRank = root;
      given.timeout = options.timeout;
      return engine.broadcast(to, given);
    };
  }
  return issue(std::move(collective));
}

DistributedBackend::Work DistributedBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return issue(moving(
      OpType::_ALLGATHER_BASE, "all_gather_into_tensor", output, input,
      [options](Backend& engine, at::Tensor& to, at::Tensor& from) { return gather_flat(engine, to, from, options); }));
}

DistributedBackend::Work DistributedBackend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return issue(moving(
      OpType::ALLGATHER_COALESCED, "all_gather_coalesced", outputs, inputs,
      [options](Backend& engine, TensorLists& to, Tensors& from) {
        return engine.allgather_coalesced(to, from, options);
      }));
}

DistributedBackend::Work DistributedBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  check_pairs(outputs, inputs, "all_gather_into_tensor_coalesced");
  Collective all{OpType::ALLGATHER_COALESCED, "all_gather_into_tensor_coalesced", {}, outputs, inputs};
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto one =
        moving(all.type, "", outputs[i], inputs[i], [options](Backend& engine, at::Tensor& to, at::Tensor& from) {
          return gather_flat(engine, to, from, options);
        });
    all.parts.push_back(std::move(one.parts.front()));
  }
  return issue(std::move(all));
}

DistributedBackend::Work DistributedBackend::gather(
    TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return issue(moving(
      OpType::GATHER, "gather", outputs, inputs,
      [options](Backend& engine, TensorLists& to, Tensors& from) { return engine.gather(to, from, options); }));
}

DistributedBackend::Work DistributedBackend::scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  return issue(moving(
      OpType::SCATTER, "scatter", outputs, inputs,
      [options](Backend& engine, Tensors& to, TensorLists& from) { return engine.scatter(to, from, options); }));
}

DistributedBackend::Work DistributedBackend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  Collective collective{OpType::REDUCE_SCATTER, "reduce_scatter", {}, outputs, flattened(inputs)};
  add_reduction(
      collective, outputs, inputs, options, getSize(),
      [](Backend& engine, Tensors& to, TensorLists& from, const c10d::ReduceScatterOptions& given) {
        return engine.reduce_scatter(to, from, given);
      });
  return issue(std::move(collective));
}

DistributedBackend::Work DistributedBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensors(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", outputs, inputs, options);
}

DistributedBackend::Work DistributedBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return reduce_scatter_tensors(
      compat::reduce_scatter_tensor_coalesced<OpType>(), "reduce_scatter_tensor_coalesced", outputs, inputs, options);
}

DistributedBackend::Work DistributedBackend::reduce_scatter_tensors(
    OpType type, const char* name, Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  check_pairs(outputs, inputs, name);
  Collective collective{type, name, {}, outputs, inputs};
  for (size_t i = 0; i < outputs.size(); ++i) {
    add_reduction(
        collective, outputs[i], inputs[i], options, getSize(),
        [](Backend& engine, at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& given) {
          at::Tensor output = flat(to), input = flat(from);
          return engine._reduce_scatter_base(output, input, given);
        });
  }
  return issue(std::move(collective));
}

DistributedBackend::Work DistributedBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  return issue(moving(
      OpType::ALLTOALL_BASE, "all_to_all_single", output, input,
      [output_splits, input_splits, options](Backend& engine, at::Tensor& to, at::Tensor& from) mutable {
        return engine.alltoall_base(to, from, output_splits, input_splits, options);
      }));
}

// Gloo's function for lists takes tensors of one size only.
DistributedBackend::Work DistributedBackend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  check_pairs(outputs, inputs, "all_to_all");
  Collective collective{OpType::ALLTOALL, "all_to_all", {}, outputs, inputs};
  auto& part = collective.parts.emplace_back();
  const Tensors to = flat(movable(part.stage(outputs, Access::Write)));
  const Tensors from = flat(movable(part.stage(inputs, Access::Read)));
  std::vector<int64_t> to_sizes, from_sizes;
  for (size_t i = 0; i < to.size(); ++i) {
    to_sizes.push_back(to[i].numel());
    from_sizes.push_back(from[i].numel());
  }
  at::Tensor received =
      at::empty({std::accumulate(to_sizes.begin(), to_sizes.end(), int64_t{0})}, to.front().options());
  part.start = [received, from, to_sizes, from_sizes, options](Backend& engine) mutable {
    at::Tensor sent = at::cat(from);
    return engine.alltoall_base(received, sent, to_sizes, from_sizes, options);
  };
  part.finish = [received, to, to_sizes] {
    const Tensors pieces = received.split_with_sizes(to_sizes);
    for (size_t i = 0; i < to.size(); ++i) {
      to[i].copy_(pieces[i]);
    }
  };
  return issue(std::move(collective));
}

DistributedBackend::Work DistributedBackend::send(Tensors& tensors, int destination, int tag) {
  check_one(tensors, "send");
  TORCH_CHECK_VALUE(destination != getRank(), "rank ", destination, " cannot send to itself: copy the tensor");
  Collective collective{OpType::SEND, "send", {}, tensors};
  auto& part = collective.parts.emplace_back();
  part.start = [hosts = movable(part.stage(tensors, Access::Read)), destination, tag](Backend& engine) mutable {
    return engine.send(hosts, destination, tag);
  };
  return issue(std::move(collective));
}

DistributedBackend::Work DistributedBackend::recv(Tensors& tensors, int source, int tag) {
  check_one(tensors, "recv");
  TORCH_CHECK_VALUE(source != getRank(), "rank ", source, " cannot receive from itself: copy the tensor");
  Collective collective{OpType::RECV, "recv", {}, tensors};
  auto& part = collective.parts.emplace_back();
  part.start = [hosts = movable(part.stage(tensors, Access::Write)), source, tag](Backend& engine) mutable {
    return engine.recv(hosts, source, tag);
  };
  return issue(std::move(collective));
}

// The source is known when the tensor has arrived, so the host waits.
DistributedBackend::Work DistributedBackend::recvAnysource(Tensors& tensors, int tag) {
  check_one(tensors, "recv");
  Collective collective{OpType::RECVANYSOURCE, "recv", {}, tensors};
  auto& part = collective.parts.emplace_back();
  part.start = [hosts = movable(part.stage(tensors, Access::Write)), tag](Backend& engine) mutable {
    return engine.recvAnysource(hosts, tag);
  };
  return issue(std::move(collective), /*blocks_host=*/true);
}

// As on CUDA, the host waits, and the current device's earlier work comes before the barrier.
DistributedBackend::Work DistributedBackend::barrier(const c10d::BarrierOptions& options) {
  synchronize_stream(current_stream(current_device()));
  Collective collective{OpType::BARRIER, "barrier", {}, {}};
  auto& part = collective.parts.emplace_back();
  part.start = [options](Backend& engine) { return engine.barrier(options); };
  return issue(std::move(collective), /*blocks_host=*/true);
}

void DistributedBackend::startCoalescing() {
  std::lock_guard<std::mutex> guard(lock_);
  coalescing_ = true;
}

DistributedBackend::Work DistributedBackend::endCoalescing() {
  std::lock_guard<std::mutex> guard(lock_);
  TORCH_CHECK(coalescing_, "endCoalescing() was called without startCoalescing()");
  coalescing_ = false;
  return c10::make_intrusive<CoalescedWork>(getRank(), std::exchange(coalesced_, {}));
}

void DistributedBackend::setSequenceNumberForGroup() {
  engine_->setSequenceNumberForGroup();
}

uint64_t DistributedBackend::getSequenceNumberForGroup() {
  return engine_->getSequenceNumberForGroup();
}

c10d::ErrorType DistributedBackend::getError() {
  std::lock_guard<std::mutex> guard(lock_);
  const bool failed =
      std::any_of(open_.begin(), open_.end(), [](const auto& work) { return work->exception() != nullptr; });
  return failed || aborted_ ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void DistributedBackend::abort() {
  std::vector<c10::intrusive_ptr<CollectiveWork>> open;
  {
    std::lock_guard<std::mutex> guard(lock_);
    aborted_ = true;
    open.swap(open_);
  }
  for (const auto& work : open) {
    work->abort();
  }
  engine_->abort();
}

void DistributedBackend::shutdown() {
  engine_->shutdown();
}

} // namespace backplane
