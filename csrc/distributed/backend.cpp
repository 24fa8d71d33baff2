#include "distributed/backend.h"

#include <algorithm>
#include <utility>

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

// Engines do not divide. AVG is computed as SUM, which `finish` divides.
ReduceOp engine_operation(const ReduceOp& operation) {
  return operation == ReduceOp::AVG ? ReduceOp(ReduceOp::SUM) : operation;
}

std::function<void()> division(const ReduceOp& operation, Tensors results, int size) {
  if (operation != ReduceOp::AVG) {
    return {};
  }
  for (const auto& result : results) {
    TORCH_CHECK_VALUE(
        result.is_floating_point(), "ReduceOp.AVG needs tensors of a floating-point dtype, not ", result.scalar_type());
  }
  return [results = std::move(results), size] {
    for (const auto& result : results) {
      result.div_(size);
    }
  };
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

void check_pairs(const Tensors& outputs, const Tensors& inputs, const char* name) {
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size(), name, " got ", outputs.size(), " outputs for ", inputs.size(), " inputs");
}

Tensors flattened(const DistributedBackend::TensorLists& lists) {
  Tensors all;
  for (const auto& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

// A collective in which the engine only moves data from `inputs` to `outputs`: tensors, lists, or lists of lists.
template <typename Outputs, typename Inputs, typename Call>
Collective moving(OpType type, const char* name, Tensors results, Outputs& outputs, Inputs& inputs, Call call) {
  Collective collective{type, name, {}, std::move(results)};
  auto& part = collective.parts.emplace_back();
  part.start = [to = movable(part.stage(outputs, Access::Write)), from = movable(part.stage(inputs, Access::Read)),
                call](c10d::Backend& engine) mutable { return call(engine, to, from); };
  return collective;
}

// A part that reduces `inputs` into `outputs`.
template <typename Outputs, typename Inputs, typename Call>
void add_reduction(
    Collective& collective, Outputs& outputs, Inputs& inputs, c10d::ReduceScatterOptions options, int size, Call call) {
  auto& part = collective.parts.emplace_back();
  auto to = part.stage(outputs, Access::Write);
  part.finish = division(options.reduceOp, Tensors{to}, size);
  options.reduceOp = engine_operation(options.reduceOp);
  part.start = [to, from = part.stage(inputs, Access::Read), options, call](c10d::Backend& engine) mutable {
    return call(engine, to, from, options);
  };
}

} // namespace

// --- calls in order --------------------------------------------------------------------------------------------------

void OrderedCalls::finish() {
  {
    std::lock_guard<std::mutex> guard(lock_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void OrderedCalls::add(std::function<void()> function) {
  std::lock_guard<std::mutex> guard(lock_);
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { serve(); });
  }
  functions_.push_back(std::move(function));
  changed_.notify_all();
}

bool OrderedCalls::empty() const {
  std::lock_guard<std::mutex> guard(lock_);
  return functions_.empty() && !calling_;
}

void OrderedCalls::serve() {
  std::unique_lock<std::mutex> guard(lock_);
  while (true) {
    changed_.wait(guard, [this] { return ending_ || !functions_.empty(); });
    if (functions_.empty()) {
      return;
    }
    auto function = std::move(functions_.front());
    functions_.pop_front();
    calling_ = true;
    guard.unlock();
    function();
    function = nullptr; // without the lock: it can own the last reference to a Work
    guard.lock();
    calling_ = false;
  }
}

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
        CollectiveWork::Group{getRank(), getSize(), getGroupDesc()}, std::move(collective), sequence_number_++,
        blocks_host, std::move(streams));
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
    part.start = [hosts, given = options](Backend& engine) mutable {
      given.reduceOp = engine_operation(given.reduceOp);
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
  part.start = [hosts, given = options](Backend& engine) mutable {
    given.reduceOp = engine_operation(given.reduceOp);
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
    part.finish = receives ? division(options.reduceOp, hosts, getSize()) : nullptr;
    part.start = [hosts, receives, shares, given = options](Backend& engine) mutable {
      given.reduceOp = engine_operation(given.reduceOp);
      if (shares && !receives) {
        hosts[0] = hosts[0].clone();
      }
      return engine.reduce(hosts, given);
    };
  }
  return issue(std::move(collective));
}

DistributedBackend::Work DistributedBackend::allgather(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return issue(moving(
      OpType::ALLGATHER, "all_gather", flattened(outputs), outputs, inputs,
      [options](Backend& engine, TensorLists& to, Tensors& from) { return engine.allgather(to, from, options); }));
}

DistributedBackend::Work DistributedBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return issue(moving(
      OpType::_ALLGATHER_BASE, "all_gather_into_tensor", {output}, output, input,
      [options](Backend& engine, at::Tensor& to, at::Tensor& from) {
        return engine._allgather_base(to, from, options);
      }));
}

DistributedBackend::Work DistributedBackend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return issue(moving(
      OpType::ALLGATHER_COALESCED, "all_gather_coalesced", flattened(outputs), outputs, inputs,
      [options](Backend& engine, TensorLists& to, Tensors& from) {
        return engine.allgather_coalesced(to, from, options);
      }));
}

DistributedBackend::Work DistributedBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  check_pairs(outputs, inputs, "all_gather_into_tensor_coalesced");
  Collective all{OpType::ALLGATHER_COALESCED, "all_gather_into_tensor_coalesced", {}, outputs};
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto one =
        moving(all.type, "", {}, outputs[i], inputs[i], [options](Backend& engine, at::Tensor& to, at::Tensor& from) {
          return engine._allgather_base(to, from, options);
        });
    all.parts.push_back(std::move(one.parts.front()));
  }
  return issue(std::move(all));
}

DistributedBackend::Work DistributedBackend::gather(
    TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return issue(moving(
      OpType::GATHER, "gather", flattened(outputs), outputs, inputs,
      [options](Backend& engine, TensorLists& to, Tensors& from) { return engine.gather(to, from, options); }));
}

DistributedBackend::Work DistributedBackend::scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  return issue(moving(
      OpType::SCATTER, "scatter", outputs, outputs, inputs,
      [options](Backend& engine, Tensors& to, TensorLists& from) { return engine.scatter(to, from, options); }));
}

DistributedBackend::Work DistributedBackend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  Collective collective{OpType::REDUCE_SCATTER, "reduce_scatter", {}, outputs};
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
      OpType::REDUCE_SCATTER_TENSOR_COALESCED, "reduce_scatter_tensor_coalesced", outputs, inputs, options);
}

DistributedBackend::Work DistributedBackend::reduce_scatter_tensors(
    OpType type, const char* name, Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  check_pairs(outputs, inputs, name);
  Collective collective{type, name, {}, outputs};
  for (size_t i = 0; i < outputs.size(); ++i) {
    add_reduction(
        collective, outputs[i], inputs[i], options, getSize(),
        [](Backend& engine, at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& given) {
          return engine._reduce_scatter_base(to, from, given);
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
      OpType::ALLTOALL_BASE, "all_to_all_single", {output}, output, input,
      [output_splits, input_splits, options](Backend& engine, at::Tensor& to, at::Tensor& from) mutable {
        return engine.alltoall_base(to, from, output_splits, input_splits, options);
      }));
}

DistributedBackend::Work DistributedBackend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return issue(moving(
      OpType::ALLTOALL, "all_to_all", outputs, outputs, inputs,
      [options](Backend& engine, Tensors& to, Tensors& from) { return engine.alltoall(to, from, options); }));
}

DistributedBackend::Work DistributedBackend::send(Tensors& tensors, int destination, int tag) {
  check_one(tensors, "send");
  Collective collective{OpType::SEND, "send", {}, tensors};
  auto& part = collective.parts.emplace_back();
  part.start = [hosts = movable(part.stage(tensors, Access::Read)), destination, tag](Backend& engine) mutable {
    return engine.send(hosts, destination, tag);
  };
  return issue(std::move(collective));
}

DistributedBackend::Work DistributedBackend::recv(Tensors& tensors, int source, int tag) {
  check_one(tensors, "recv");
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
