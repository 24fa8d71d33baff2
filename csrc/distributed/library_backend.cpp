#include "distributed/library_backend.h"

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

#include "devices/device.h"
#include "devices/shutdown.h"
#include "distributed/collective.h"
#include "distributed/failure.h"
#include "distributed/library_work.h"
#include "streams/capture.h"
#include "streams/stream.h"

namespace backplane {
namespace {

using c10d::OpType;
using Kind = CommunicationStep::Kind;
using Tensors = LibraryBackend::Tensors;
using TensorLists = LibraryBackend::TensorLists;

constexpr int kAll = -1; // not a peer: all ranks
constexpr auto kWatchPeriod = std::chrono::milliseconds(50);
constexpr auto kMostFinish = std::chrono::seconds(10); // to leave a group: other ranks can be lost

const at::Tensor& one_of(const Tensors& tensors, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == 1, name, " takes one tensor per rank, but got ", tensors.size());
  return tensors.front();
}

const Tensors& list_of(const TensorLists& lists, int size, const char* name) {
  TORCH_CHECK_VALUE(lists.size() == 1, name, " takes one list per rank, but got ", lists.size());
  TORCH_CHECK_VALUE(
      static_cast<int>(lists.front().size()) == size, name, " got a list of ", lists.front().size(), " tensors for ",
      size, " ranks");
  return lists.front();
}

void check_size(const at::Tensor& large, const at::Tensor& small, int times, const char* name) {
  TORCH_CHECK_VALUE(
      large.numel() == small.numel() * times && large.scalar_type() == small.scalar_type(), name, " got tensors of ",
      large.numel(), " and ", small.numel(), " elements (", large.scalar_type(), ", ", small.scalar_type(),
      "), but one must have ", times, " times as many as the other, of the same dtype");
}

// The parts of a tensor for the ranks, as views.
Tensors parts_of(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  check_tensor(tensor);
  TORCH_CHECK_VALUE(
      tensor.is_contiguous(), "Tensors must be contiguous, but got strides ", tensor.strides(), " for sizes ",
      tensor.sizes());
  c10d::checkSplitSizes(splits, tensor, size);
  const auto rows = splits.empty() ? std::vector<int64_t>(size, tensor.size(0) / size) : splits;
  return tensor.detach().split_with_sizes(rows);
}

Communication begun(OpType type, const char* name, std::chrono::milliseconds timeout, Tensors outputs, Tensors inputs) {
  Communication made;
  made.type = type;
  made.name = name;
  made.timeout = timeout;
  made.outputs = std::move(outputs);
  made.inputs = std::move(inputs);
  return made;
}

} // namespace

LibraryBackend::LibraryBackend(
    c10::intrusive_ptr<c10d::Backend> staged,
    c10::intrusive_ptr<c10d::Store> store,
    Libraries libraries,
    std::chrono::milliseconds timeout)
    : Backend(staged->getRank(), staged->getSize()),
      staged_(std::move(staged)),
      store_(std::move(store)),
      libraries_(std::move(libraries)),
      all_ranks_(getSize()),
      places_(getSize()),
      timeout_(timeout) {
  std::iota(all_ranks_.begin(), all_ranks_.end(), 0);
  init();
}

// The threads can need the GIL, to release tensors that Python knows.
LibraryBackend::~LibraryBackend() {
  const GilReleased released;
  end_watch();
  fail("the process group was destroyed", nullptr);
  for (const auto& channel : channels()) {
    channel->end_calls();
  }
}

c10::intrusive_ptr<c10d::Backend::Options> LibraryBackend::getBackendOptions() {
  return staged_->getBackendOptions();
}

void LibraryBackend::setTimeout(std::chrono::milliseconds timeout) {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    timeout_ = timeout;
  }
  staged_->setTimeout(timeout);
}

// --- the choice between the library and the staged backend -----------------------------------------------------------

// Waits until another rank has written the key. Does not block other users of the store meanwhile.
std::vector<uint8_t> LibraryBackend::read(const std::string& key, Deadline deadline, const std::string& lacking) {
  constexpr auto kFirstPause = std::chrono::milliseconds(1), kLastPause = std::chrono::milliseconds(50);
  for (auto pause = kFirstPause; !store_->check({key}); pause = std::min(2 * pause, kLastPause)) {
    TORCH_CHECK_WITH(DistBackendError, !has_failed_, "the process group '", getGroupDesc(), "' has failed");
    TORCH_CHECK_WITH(
        DistBackendError, std::chrono::steady_clock::now() < deadline, lacking, " within the timeout, on rank ",
        getRank(), " of ", getSize(), " (group '", getGroupDesc(), "')");
    std::this_thread::sleep_for(pause);
  }
  return store_->get(key);
}

// The place of a rank's device (CommunicationLibrary::place), or an empty string if it has no library. The caller holds
// places_lock_.
const std::string& LibraryBackend::place_of(int rank, Deadline deadline) {
  auto& place = places_[rank];
  if (!place.has_value()) {
    const auto found = read(c10::str("place/", rank), deadline, c10::str("rank ", rank, " did not begin a collective"));
    place.emplace(found.begin(), found.end());
  }
  return *place;
}

// Notes the device of this rank at the first collective. The caller holds places_lock_.
void LibraryBackend::publish_device(c10::DeviceIndex index) {
  if (device_.has_value()) {
    return;
  }
  const auto library = libraries_.find(index);
  const std::string place = library == libraries_.end() ? "" : library->second->place();
  places_[getRank()] = place;
  store_->set(c10::str("place/", getRank()), std::vector<uint8_t>(place.begin(), place.end()));
  device_ = index;
}

// Whether ranks must use the staged backend: two are on the same hardware, or one has no library. The caller holds
// places_lock_.
bool LibraryBackend::decide(const std::vector<int>& ranks) {
  std::map<std::string, int> ranks_at;
  for (const int rank : ranks) {
    const auto& place = place_of(rank, std::chrono::steady_clock::now() + timeout());
    if (place.empty()) {
      TORCH_WARN_ONCE(
          "torch_backplane: rank ", rank, " of a process group has no communication library, so the collectives of ",
          "its groups use copies in host memory");
      return true;
    }
    const auto [other, is_new] = ranks_at.emplace(place, rank);
    if (!is_new) {
      TORCH_WARN_ONCE(
          "torch_backplane: ranks ", other->second, " and ", rank, " of a process group share a GPU, and NCCL needs ",
          "one GPU per rank, so their collectives use copies in host memory. If each rank has its own GPU, call ",
          "torch.bp.set_device() before the first collective");
      return true;
    }
  }
  return false;
}

// Returns the decision for a group of ranks, and makes it in the first call.
bool LibraryBackend::decided(std::optional<bool>& decision, const Tensors& tensors, const std::vector<int>& ranks) {
  TORCH_CHECK_VALUE(!tensors.empty(), "a collective needs tensors");
  const at::Tensor& tensor = tensors.front();
  check_tensor(tensor);
  const auto index = tensor.device().index();
  if (!decision.has_value()) {
    publish_device(index);
    decision = decide(ranks);
  }
  TORCH_CHECK_VALUE(
      *decision || index == *device_, "the process group '", getGroupDesc(),
      "' communicates from bp:", static_cast<int>(*device_), ", the device of its first tensors, but got a tensor on ",
      tensor.device(), ": use one device per rank");
  return *decision;
}

bool LibraryBackend::is_staged(const Tensors& tensors) {
  const GilReleased released;
  const std::lock_guard<std::mutex> guard(places_lock_);
  const bool staged = decided(is_staged_, tensors, all_ranks_);
  const std::lock_guard<std::mutex> coalescing(lock_);
  if (staged && coalesced_.has_value() && !std::exchange(coalesces_staged_, true)) {
    staged_->startCoalescing();
  }
  return staged;
}

bool LibraryBackend::is_pair_staged(const Tensors& tensors, int peer) {
  TORCH_CHECK_VALUE(
      peer >= 0 && peer < getSize(), "rank ", peer, " is not in the process group '", getGroupDesc(), "' of ",
      getSize(), " ranks");
  const GilReleased released;
  const std::lock_guard<std::mutex> guard(places_lock_);
  return decided(are_pairs_staged_[peer], tensors, {std::min(peer, getRank()), std::max(peer, getRank())});
}

std::chrono::milliseconds LibraryBackend::timeout() {
  const std::lock_guard<std::mutex> guard(lock_);
  return timeout_;
}

// --- issue -----------------------------------------------------------------------------------------------------------

std::unique_ptr<Communicator> LibraryBackend::join(int peer, Deadline deadline) {
  const int low = std::min(peer, getRank()), high = std::max(peer, getRank());
  const int rank = peer == kAll ? getRank() : getRank() == high;
  const std::string key = peer == kAll ? "id/all" : c10::str("id/", low, "-", high);
  CommunicationLibrary& library = *libraries_.at(*device_);
  std::string id;
  if (rank == 0) {
    id = library.make_id();
    store_->set(key, std::vector<uint8_t>(id.begin(), id.end()));
  } else {
    const auto found = read(key, deadline, c10::str("rank ", peer == kAll ? 0 : low, " did not begin to communicate"));
    id.assign(found.begin(), found.end());
  }
  return library.join(id, rank, peer == kAll ? getSize() : 2);
}

// The caller holds lock_.
std::shared_ptr<Channel> LibraryBackend::channel_to(int peer) {
  auto& channel = channels_[peer];
  if (channel == nullptr) {
    channel = std::make_shared<Channel>(
        *device_, [this, peer](Deadline deadline) { return join(peer, deadline); },
        [this](const Channel::Pending& communication, const std::exception_ptr& error) {
          fail(text_of(error), communication.get());
        });
  }
  return channel;
}

std::vector<std::shared_ptr<Channel>> LibraryBackend::channels() {
  const std::lock_guard<std::mutex> guard(lock_);
  std::vector<std::shared_ptr<Channel>> all;
  for (const auto& [peer, channel] : channels_) {
    all.push_back(channel);
  }
  return all;
}

LibraryBackend::Work LibraryBackend::issue(Communication communication, int peer) {
  if (const auto capture = Capture::of(current_stream(*device_)); C10_UNLIKELY(capture != nullptr)) {
    capture->refuse("collectives of torch.distributed cannot be captured");
  }
  const GilReleased released;
  LibraryWork::Subject subject{
      communication.type, std::move(communication.outputs), std::move(communication.inputs), communication.blocks_host};
  std::shared_ptr<Channel> channel;
  uint64_t number = 0;
  auto timeout = communication.timeout;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    TORCH_CHECK_WITH(
        DistBackendError, failure_.empty(), "the process group '", getGroupDesc(), "' failed earlier: ", failure_);
    channel = channel_to(peer);
    number = number_++;
    timeout = timeout == c10d::kUnsetTimeout ? timeout_ : timeout;
  }
  // Without the lock, which the watch needs: recording an event waits if the device has much to do.
  const auto pending = std::make_shared<PendingCommunication>(
      std::move(communication), Member{getRank(), getSize(), getGroupDesc()}, number, timeout);
  const auto work = c10::make_intrusive<LibraryWork>(std::move(subject), pending);
  work->begin();
  channel->add(pending);
  const std::lock_guard<std::mutex> guard(lock_);
  if (!watch_.joinable() && !ending_) {
    watch_ = std::thread([this] { watch(); });
  }
  if (!std::exchange(has_open_, true)) {
    changed_.notify_all();
  }
  return work;
}

// Issues it with all ranks, or adds it to the coalesced ones.
LibraryBackend::Work LibraryBackend::issue_to_group(Communication communication) {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (coalesced_.has_value()) {
      if (coalesced_->tensors.empty()) {
        coalesced_->name = communication.name + " (coalesced)";
      }
      coalesced_->append(std::move(communication));
      return nullptr; // endCoalescing() returns the Work
    }
  }
  return issue(std::move(communication), kAll);
}

// --- collectives -----------------------------------------------------------------------------------------------------

LibraryBackend::Work LibraryBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = one_of(tensors, "broadcast");
  if (is_staged(tensors)) {
    return staged_->broadcast(tensors, options);
  }
  auto made = begun(OpType::BROADCAST, "broadcast", options.timeout, tensors, {});
  made.move(Kind::Broadcast, tensor, tensor, static_cast<int>(options.rootRank));
  return issue_to_group(std::move(made));
}

LibraryBackend::Work LibraryBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = one_of(tensors, "all_reduce");
  if (is_staged(tensors)) {
    return staged_->allreduce(tensors, options);
  }
  auto made = begun(OpType::ALLREDUCE, "all_reduce", options.timeout, tensors, {});
  made.reduce(Kind::AllReduce, tensor, tensor, options.reduceOp);
  return issue_to_group(std::move(made));
}

LibraryBackend::Work LibraryBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  if (is_staged(tensors)) {
    return staged_->allreduce_coalesced(tensors, options);
  }
  auto made = begun(OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", options.timeout, tensors, {});
  for (const auto& tensor : tensors) {
    made.reduce(Kind::AllReduce, tensor, tensor, options.reduceOp);
  }
  return issue_to_group(std::move(made));
}

LibraryBackend::Work LibraryBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = one_of(tensors, "reduce");
  if (is_staged(tensors)) {
    return staged_->reduce(tensors, options);
  }
  auto made = begun(OpType::REDUCE, "reduce", options.timeout, tensors, {});
  made.reduce(Kind::Reduce, tensor, tensor, options.reduceOp, static_cast<int>(options.rootRank));
  return issue_to_group(std::move(made));
}

// Each rank broadcasts its tensor, whose size the others know.
LibraryBackend::Work LibraryBackend::allgather(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const at::Tensor& input = one_of(inputs, "all_gather");
  const Tensors& list = list_of(outputs, getSize(), "all_gather");
  if (is_staged(inputs)) {
    return staged_->allgather(outputs, inputs, options);
  }
  auto made = begun(OpType::ALLGATHER, "all_gather", options.timeout, list, inputs);
  check_size(list[getRank()], input, 1, "all_gather");
  for (int rank = 0; rank < getSize(); ++rank) {
    made.move(Kind::Broadcast, rank == getRank() ? input : at::Tensor(), list[rank], rank);
  }
  return issue_to_group(std::move(made));
}

LibraryBackend::Work LibraryBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  if (is_staged({input})) {
    return staged_->_allgather_base(output, input, options);
  }
  auto made = begun(OpType::_ALLGATHER_BASE, "all_gather_into_tensor", options.timeout, {output}, {input});
  check_size(output, input, getSize(), "all_gather_into_tensor");
  made.move(Kind::AllGather, input, output);
  return issue_to_group(std::move(made));
}

LibraryBackend::Work LibraryBackend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  if (is_staged(inputs)) {
    return staged_->allgather_coalesced(outputs, inputs, options);
  }
  TORCH_CHECK_VALUE(
      static_cast<int>(outputs.size()) == getSize(), "all_gather_coalesced got ", outputs.size(), " lists for ",
      getSize(), " ranks");
  auto made = begun(OpType::ALLGATHER_COALESCED, "all_gather_coalesced", options.timeout, flattened(outputs), inputs);
  for (int rank = 0; rank < getSize(); ++rank) {
    check_pairs(outputs[rank], inputs, "all_gather_coalesced");
    for (size_t i = 0; i < inputs.size(); ++i) {
      made.move(Kind::Broadcast, rank == getRank() ? inputs[i] : at::Tensor(), outputs[rank][i], rank);
    }
  }
  return issue_to_group(std::move(made));
}

LibraryBackend::Work LibraryBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  constexpr const char* kName = "all_gather_into_tensor_coalesced";
  check_pairs(outputs, inputs, kName);
  if (is_staged(inputs)) {
    return staged_->allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  auto made = begun(OpType::ALLGATHER_COALESCED, kName, options.timeout, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_size(outputs[i], inputs[i], getSize(), kName);
    made.move(Kind::AllGather, inputs[i], outputs[i]);
  }
  return issue_to_group(std::move(made));
}

LibraryBackend::Work LibraryBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const at::Tensor& input = one_of(inputs, "gather");
  if (is_staged(inputs)) {
    return staged_->gather(outputs, inputs, options);
  }
  const int root = static_cast<int>(options.rootRank);
  auto made = begun(OpType::GATHER, "gather", options.timeout, flattened(outputs), inputs);
  made.move(Kind::Send, input, {}, root);
  if (root == getRank()) {
    const Tensors& list = list_of(outputs, getSize(), "gather");
    for (int rank = 0; rank < getSize(); ++rank) {
      check_size(list[rank], input, 1, "gather");
      made.move(Kind::Receive, {}, list[rank], rank);
    }
  }
  return issue_to_group(std::move(made));
}

LibraryBackend::Work LibraryBackend::scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  const at::Tensor& output = one_of(outputs, "scatter");
  if (is_staged(outputs)) {
    return staged_->scatter(outputs, inputs, options);
  }
  const int root = static_cast<int>(options.rootRank);
  auto made = begun(OpType::SCATTER, "scatter", options.timeout, outputs, flattened(inputs));
  if (root == getRank()) {
    const Tensors& list = list_of(inputs, getSize(), "scatter");
    for (int rank = 0; rank < getSize(); ++rank) {
      check_size(list[rank], output, 1, "scatter");
      made.move(Kind::Send, list[rank], {}, rank);
    }
  }
  made.move(Kind::Receive, {}, output, root);
  return issue_to_group(std::move(made));
}

// Each rank is the root of a reduction, to which the others contribute tensors of its size.
LibraryBackend::Work LibraryBackend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = one_of(outputs, "reduce_scatter");
  const Tensors& list = list_of(inputs, getSize(), "reduce_scatter");
  if (is_staged(outputs)) {
    return staged_->reduce_scatter(outputs, inputs, options);
  }
  auto made = begun(OpType::REDUCE_SCATTER, "reduce_scatter", options.timeout, outputs, list);
  check_size(list[getRank()], output, 1, "reduce_scatter");
  for (int rank = 0; rank < getSize(); ++rank) {
    made.reduce(Kind::Reduce, list[rank], rank == getRank() ? output : at::Tensor(), options.reduceOp, rank);
  }
  return issue_to_group(std::move(made));
}

LibraryBackend::Work LibraryBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  if (is_staged({input})) {
    return staged_->_reduce_scatter_base(output, input, options);
  }
  auto made = begun(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", options.timeout, {output}, {input});
  check_size(input, output, getSize(), "reduce_scatter_tensor");
  made.reduce(Kind::ReduceScatter, input, output, options.reduceOp);
  return issue_to_group(std::move(made));
}

LibraryBackend::Work LibraryBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  constexpr const char* kName = "reduce_scatter_tensor_coalesced";
  check_pairs(outputs, inputs, kName);
  if (is_staged(inputs)) {
    return staged_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  auto made = begun(OpType::COALESCED, kName, options.timeout, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_size(inputs[i], outputs[i], getSize(), kName);
    made.reduce(Kind::ReduceScatter, inputs[i], outputs[i], options.reduceOp);
  }
  return issue_to_group(std::move(made));
}

LibraryBackend::Work LibraryBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  if (is_staged({input})) {
    return staged_->alltoall_base(output, input, output_splits, input_splits, options);
  }
  TORCH_CHECK_VALUE(
      output.scalar_type() == input.scalar_type(), "all_to_all_single got tensors of ", output.scalar_type(), " and ",
      input.scalar_type());
  auto made = begun(OpType::ALLTOALL_BASE, "all_to_all_single", options.timeout, {output}, {input});
  const Tensors sent = parts_of(input, input_splits, getSize());
  const Tensors received = parts_of(output, output_splits, getSize());
  for (int rank = 0; rank < getSize(); ++rank) {
    made.move(Kind::Send, sent[rank], {}, rank);
    made.move(Kind::Receive, {}, received[rank], rank);
  }
  return issue_to_group(std::move(made));
}

LibraryBackend::Work LibraryBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  check_pairs(outputs, inputs, "all_to_all");
  if (is_staged(inputs)) {
    return staged_->alltoall(outputs, inputs, options);
  }
  TORCH_CHECK_VALUE(
      static_cast<int>(inputs.size()) == getSize(), "all_to_all got lists of ", inputs.size(), " tensors for ",
      getSize(), " ranks");
  auto made = begun(OpType::ALLTOALL, "all_to_all", options.timeout, outputs, inputs);
  for (int rank = 0; rank < getSize(); ++rank) {
    made.move(Kind::Send, inputs[rank], {}, rank);
    made.move(Kind::Receive, {}, outputs[rank], rank);
  }
  return issue_to_group(std::move(made));
}

bool LibraryBackend::is_coalescing() {
  const std::lock_guard<std::mutex> guard(lock_);
  return coalesced_.has_value();
}

bool LibraryBackend::is_sending_staged(const Tensors& tensors, int peer) {
  return is_coalescing() ? is_staged(tensors) : is_pair_staged(tensors, peer);
}

// Issues a send or a receive: with the group if it is coalesced, else with the other rank.
LibraryBackend::Work LibraryBackend::issue_to_pair(
    Communication communication, int peer, Kind kind, const at::Tensor& tensor) {
  const bool sends = kind == Kind::Send;
  const bool is_coalesced = is_coalescing();
  const int rank = is_coalesced ? peer : peer > getRank(); // in the communicator
  communication.move(kind, sends ? tensor : at::Tensor(), sends ? at::Tensor() : tensor, rank);
  return is_coalesced ? issue_to_group(std::move(communication)) : issue(std::move(communication), peer);
}

LibraryBackend::Work LibraryBackend::send(Tensors& tensors, int destination, int tag) {
  const at::Tensor& tensor = one_of(tensors, "send");
  TORCH_CHECK_VALUE(destination != getRank(), "rank ", destination, " cannot send to itself: copy the tensor");
  if (is_sending_staged(tensors, destination)) {
    return staged_->send(tensors, destination, tag);
  }
  return issue_to_pair(begun(OpType::SEND, "send", c10d::kUnsetTimeout, tensors, {}), destination, Kind::Send, tensor);
}

LibraryBackend::Work LibraryBackend::recv(Tensors& tensors, int source, int tag) {
  const at::Tensor& tensor = one_of(tensors, "recv");
  TORCH_CHECK_VALUE(source != getRank(), "rank ", source, " cannot receive from itself: copy the tensor");
  if (is_sending_staged(tensors, source)) {
    return staged_->recv(tensors, source, tag);
  }
  return issue_to_pair(begun(OpType::RECV, "recv", c10d::kUnsetTimeout, tensors, {}), source, Kind::Receive, tensor);
}

// The library needs a source. The staged backend receives from any rank if it also sends for all of them.
LibraryBackend::Work LibraryBackend::recvAnysource(Tensors& tensors, int tag) {
  bool sends_all = false;
  {
    const std::lock_guard<std::mutex> guard(places_lock_);
    const auto& own = places_[getRank()];
    sends_all = is_staged_.value_or(false) && std::all_of(places_.begin(), places_.end(), [&](const auto& place) {
                  return place.has_value() && (place->empty() || own->empty() || *place == *own);
                });
  }
  TORCH_CHECK_NOT_IMPLEMENTED(sends_all, "NCCL cannot receive from any rank: name the source, recv(tensor, src=…)");
  return staged_->recvAnysource(tensors, tag);
}

// As on CUDA, the host waits, and the current stream's earlier work comes before the barrier.
LibraryBackend::Work LibraryBackend::barrier(const c10d::BarrierOptions& options) {
  c10::DeviceIndex index = current_device();
  {
    const std::lock_guard<std::mutex> guard(places_lock_);
    if (device_.has_value()) {
      index = *device_;
    } else if (options.device.has_value()) {
      index = options.device->index();
    } else if (!options.device_ids.empty()) {
      index = static_cast<c10::DeviceIndex>(options.device_ids.front());
    }
  }
  Tensors tensors{at::empty({1}, at::TensorOptions().dtype(c10::kByte).device(c10::kPrivateUse1, index))};
  if (is_staged(tensors)) {
    return staged_->barrier(options);
  }
  auto made = begun(OpType::BARRIER, "barrier", options.timeout, {}, {});
  made.reduce(Kind::AllReduce, tensors[0], tensors[0], c10d::ReduceOp::MAX);
  made.blocks_host = true;
  return issue_to_group(std::move(made));
}

void LibraryBackend::startCoalescing() {
  const std::lock_guard<std::mutex> guard(lock_);
  coalesced_ = Communication();
  coalesced_->type = OpType::COALESCED;
  coalesces_staged_ = false;
}

LibraryBackend::Work LibraryBackend::endCoalescing() {
  std::optional<Communication> made;
  bool is_staged = false;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    TORCH_CHECK(coalesced_.has_value(), "endCoalescing() was called without startCoalescing()");
    made = std::exchange(coalesced_, std::nullopt);
    is_staged = coalesces_staged_;
  }
  if (is_staged) {
    return staged_->endCoalescing();
  }
  return made->tensors.empty() ? nullptr : issue(std::move(*made), kAll);
}

// --- the watch, and the end ------------------------------------------------------------------------------------------

void LibraryBackend::watch() {
  std::unique_lock<std::mutex> guard(lock_);
  while (true) {
    changed_.wait(guard, [this] { return ending_ || has_open_; });
    if (changed_.wait_for(guard, kWatchPeriod, [this] { return ending_; })) {
      return;
    }
    has_open_ = false;
    guard.unlock();
    bool has_open = false;
    {
      const HostCall call; // the process does not exit meanwhile
      if (!call.may_run()) {
        return;
      }
      for (const auto& channel : channels()) {
        has_open = check(*channel) || has_open;
      }
    }
    guard.lock();
    has_open_ = has_open_ || has_open;
  }
}

// Returns whether communications of the channel are open.
bool LibraryBackend::check(Channel& channel) {
  try {
    const auto open = channel.open();
    for (const auto& one : open) {
      if (one->is_late()) {
        fail(c10::str("did not finish within ", one->timeout().count(), " ms: a rank is late or lost"), one.get());
        return false;
      }
    }
    const std::string error = open.empty() ? std::string() : channel.failure();
    if (!error.empty()) {
      fail(error, open.front().get());
    }
    return !open.empty();
  } catch (const std::exception&) { // the device is lost
    fail(text_of(std::current_exception()), nullptr);
    return false;
  }
}

// Ends the group. `first`: what has failed; null: not a communication.
void LibraryBackend::fail(const std::string& reason, const PendingCommunication* first) {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (failure_.empty()) {
      failure_ = first == nullptr ? reason : c10::str(first->id().name, ": ", reason);
    }
    has_failed_ = true;
  }
  for (const auto& channel : channels()) {
    channel->fail(reason);
  }
}

void LibraryBackend::end_watch() {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    ending_ = true;
  }
  changed_.notify_all();
  if (watch_.joinable()) {
    watch_.join();
  }
}

c10d::ErrorType LibraryBackend::getError() {
  return has_failed_ ? c10d::ErrorType::COMM_ERROR : staged_->getError();
}

void LibraryBackend::setSequenceNumberForGroup() {
  staged_->setSequenceNumberForGroup();
}

uint64_t LibraryBackend::getSequenceNumberForGroup() {
  return staged_->getSequenceNumberForGroup();
}

void LibraryBackend::abort() {
  const GilReleased released;
  fail("aborted", nullptr);
  staged_->abort();
}

void LibraryBackend::shutdown() {
  const GilReleased released;
  for (const auto& channel : channels()) {
    while (!has_failed_ && check(*channel)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  end_watch();
  const auto deadline = std::chrono::steady_clock::now() + kMostFinish;
  for (const auto& channel : channels()) {
    try {
      if (!has_failed_) {
        channel->finish(deadline);
      }
    } catch (const std::exception&) {
      TORCH_WARN(
          "torch_backplane: the process group '", getGroupDesc(),
          "' was aborted, because a rank did not leave it: ", text_of(std::current_exception()));
    }
  }
  fail("shut down", nullptr);
  staged_->shutdown();
}

} // namespace backplane
