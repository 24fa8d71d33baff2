#include "distributed/collective_work.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "devices/device.h"
#include "devices/shutdown.h"
#include "streams/stream.h"
#include "streams/submit.h"

namespace backplane {
namespace {

c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const c10::Error&) { // not implemented
    return nullptr;
  }
}

// Calls `done` with the error of the work (null: none) when it has finished.
template <typename Done>
void when_finished(const c10::intrusive_ptr<c10d::Work>& work, Done done) {
  if (const auto future = future_of(*work)) {
    future->addCallback([done](c10::ivalue::Future& finished) {
      done(finished.hasError() ? finished.exception_ptr() : std::exception_ptr());
    });
    return;
  }
  // Some works, such as Gloo's point-to-point ones, have no future and finish only in wait(). They can finish in any
  // order, so that each needs a thread.
  std::thread([work, done] {
    std::exception_ptr error;
    try {
      work->wait();
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    done(error);
  }).detach();
}

// The name of the collective in profiles, as Gloo writes it.
std::string title_of(const Collective& collective) {
  return "backplane:" + (collective.type == c10d::OpType::RECVANYSOURCE ? "recvAnySource" : collective.name);
}

// PyTorch's thread-local state, such as the profiler and modes, in a thread that has not changed it.
const at::ThreadLocalState& state_of_new_threads() {
  static const at::ThreadLocalState kState = [] {
    at::ThreadLocalState state;
    std::thread([&state] { state = at::ThreadLocalState(); }).join();
    return state;
  }();
  return kState;
}

std::vector<c10::Device> as_devices(const std::vector<c10::DeviceIndex>& indices) {
  std::vector<c10::Device> devices;
  for (const auto index : indices) {
    devices.emplace_back(c10::kPrivateUse1, index);
  }
  return devices;
}

} // namespace

CollectiveWork::CollectiveWork(
    const Member& member,
    Collective collective,
    uint64_t sequence_number,
    bool blocks_host,
    std::map<c10::DeviceIndex, c10::Stream> streams)
    : Work(
          member.rank,
          collective.type,
          title_of(collective).c_str(),
          collective.inputs.empty() ? collective.outputs : collective.inputs),
      collective_(std::move(collective)),
      devices_(collective_.devices()),
      blocks_host_(blocks_host),
      streams_(std::move(streams)),
      id_{member, collective_.name, collective_.bytes(), sequence_number},
      open_parts_(collective_.parts.size()),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(
              c10::ListType::create(c10::TensorType::get()), as_devices(devices_))) {
  end_recording_.swap(recordFunctionEndCallback_);
}

void CollectiveWork::end_recording() {
  if (end_recording_) {
    end_recording_();
    end_recording_ = nullptr;
  }
}

void CollectiveWork::record_current_streams() {
  for (const auto index : devices_) {
    events_.emplace_back(c10::kPrivateUse1).record(current_stream(index));
  }
}

bool CollectiveWork::can_start_now() const {
  return std::all_of(
      devices_.begin(), devices_.end(), [](c10::DeviceIndex index) { return query_stream(current_stream(index)); });
}

void CollectiveWork::start(c10d::Backend& engine, Link* link) noexcept {
  const torch::autograd::AutoGradMode no_grad(false);
  std::exception_ptr failure;
  try {
    for (const auto& event : events_) {
      event.synchronize();
    }
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  for (auto& part : collective_.parts) {
    try {
      if (failure != nullptr) {
        std::rethrow_exception(failure);
      }
      start_part(part, engine, link);
    } catch (const std::exception&) {
      finish_part(part, std::current_exception());
    }
  }
}

void CollectiveWork::start_part(CollectivePart& part, c10d::Backend& engine, Link* link) {
  copy(part, /*to_host=*/true);
  std::optional<Link::Clock::time_point> earliest; // when the modelled link has transferred the part
  if (link != nullptr) {
    earliest = link->reserve(part.bytes_sent(collective_.type, id_.member.size));
  }
  c10::intrusive_ptr<c10d::Work> work;
  {
    // Threads of the engine inherit this state. With the caller's, they would write to a profile that has ended.
    const at::ThreadLocalStateGuard state(state_of_new_threads());
    const torch::autograd::AutoGradMode no_grad(false);
    work = part.start(engine);
  }
  auto self = c10::intrusive_ptr<CollectiveWork>::reclaim_copy(this);
  when_finished(work, [self, work, &part, earliest](const std::exception_ptr& error) {
    if (earliest.has_value()) {
      std::this_thread::sleep_until(*earliest);
    }
    if (self->collective_.type == c10d::OpType::RECVANYSOURCE && error == nullptr) {
      self->source_rank_ = work->sourceRank();
    }
    self->finish_part(part, error);
  });
}

void CollectiveWork::finish_part(CollectivePart& part, std::exception_ptr error) noexcept {
  const HostCall call; // the process does not exit meanwhile
  if (!call.may_run()) {
    return;
  }
  if (error == nullptr && !ended_) {
    try {
      const torch::autograd::AutoGradMode no_grad(false);
      if (part.finish) {
        part.finish();
      }
      copy(part, /*to_host=*/false);
    } catch (const std::exception&) {
      error = std::current_exception();
    }
  }
  {
    std::lock_guard<std::mutex> guard(failure_lock_);
    if (failure_ == nullptr) {
      failure_ = error;
    }
  }
  part.tensors.clear();
  if (open_parts_.fetch_sub(1) == 1) {
    end(failure_ == nullptr ? nullptr : failure_of(id_, text_of(failure_)));
  }
}

void CollectiveWork::fail(std::exception_ptr error) noexcept {
  end(failure_of(id_, text_of(error)));
}

void CollectiveWork::end(std::exception_ptr error) noexcept {
  if (ended_.exchange(true)) {
    return;
  }
  finish(error);
  if (error != nullptr) {
    future_->setError(error);
  } else {
    std::vector<c10::Stream> idle;
    for (const auto& [index, stream] : streams_) {
      idle.push_back(stream);
    }
    const c10::MultiStreamGuard guard(idle); // the future records events on the current streams
    future_->markCompleted(c10::IValue(collective_.outputs));
  }
  signal_->set(error);
}

// Copies between tensors and stand-ins that do not share memory, and waits for the copies.
void CollectiveWork::copy(const CollectivePart& part, bool to_host) const {
  std::vector<c10::Stream> used;
  for (const auto& one : part.tensors) {
    if (one.shares_memory() || one.access == (to_host ? Access::Write : Access::Read) || one.device.numel() == 0) {
      continue;
    }
    const c10::Stream stream = streams_.at(one.device.device().index());
    const c10::StreamGuard guard(stream);
    const auto& source = to_host ? one.device : one.host;
    const auto& destination = to_host ? one.host : one.device;
    destination.copy_(source, /*non_blocking=*/true);
    used.push_back(stream);
  }
  for (const auto stream : used) {
    synchronize_stream(stream);
  }
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout && !blocks_host_) {
    synchronize();
    return true;
  }
  const GilReleased released;
  if (timeout == kNoTimeout) {
    signal_->wait();
  } else {
    TORCH_CHECK_WITH(
        DistBackendError, signal_->wait_until(std::chrono::steady_clock::now() + timeout), collective_.name,
        " did not finish within ", timeout.count(), " ms on rank ", id_.member.rank, " of ", id_.member.size,
        " (group '", id_.member.group, "')");
  }
  signal_->check();
  return true;
}

void CollectiveWork::synchronize() {
  if (devices_.empty()) {
    const GilReleased released;
    signal_->wait();
    signal_->check();
  }
  for (const auto index : devices_) {
    wait_for_signal(signal_, current_stream(index));
  }
}

void CollectiveWork::abort() {
  fail(std::make_exception_ptr(std::runtime_error("aborted")));
}

std::vector<at::Tensor> CollectiveWork::result() {
  return collective_.outputs;
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  return future_;
}

int CollectiveWork::sourceRank() const {
  return source_rank_;
}

uint64_t CollectiveWork::getSequencenumber() const {
  return id_.number;
}

bool CoalescedWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}

bool CoalescedWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) {
    work->wait(timeout);
  }
  return true;
}

void CoalescedWork::synchronize() {
  for (const auto& work : works_) {
    work->synchronize();
  }
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> results;
  for (const auto& work : works_) {
    for (auto& tensor : work->result()) {
      results.push_back(std::move(tensor));
    }
  }
  return results;
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& work : works_) {
    futures.push_back(work->getFuture());
  }
  return c10::collectAll(futures);
}

} // namespace backplane
