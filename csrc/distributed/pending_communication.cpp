#include "distributed/pending_communication.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "devices/device.h"
#include "streams/device_errors.h"
#include "streams/stream.h"

namespace backplane {

PendingCommunication::PendingCommunication(
    Communication communication, Member member, uint64_t number, std::chrono::milliseconds timeout)
    : id_{std::move(member), std::move(communication.name), communication.bytes, number},
      timeout_(timeout),
      deadline_(Clock::now() + timeout),
      issued_on_(current_stream(communication.tensors.front().device().index())),
      steps_(std::move(communication.steps)),
      tensors_(std::move(communication.tensors)) {
  begin_.record(issued_on_);
  if (!communication.blocks_host) {
    waiting_.push_back(issued_on_); // not only wait() makes it wait: Futures do, too
  }
}

void PendingCommunication::submit(Communicator& communicator, c10::Stream stream, uintptr_t queue) {
  begin_.block(stream);
  if (!steps_.empty()) {
    communicator.enqueue(steps_, queue, deadline_);
  }
  end_.record(stream);
  const c10::MultiStreamGuard guard(stream); // Futures record their events on the current stream
  submitted_->set();
}

void PendingCommunication::fail(const std::string& reason) noexcept {
  try {
    if (is_over()) {
      return;
    }
  } catch (const std::exception&) { // the device is lost
  }
  std::exception_ptr error;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (is_over_) {
      return;
    }
    is_over_ = true;
    error = failure_ = failure_of(id_, reason);
    if (submitted_->is_over()) {
      for (const auto stream : waiting_) {
        report_error(stream, error);
      }
    }
  }
  submitted_->set(error);
}

std::exception_ptr PendingCommunication::failure() const {
  const std::lock_guard<std::mutex> guard(lock_);
  return failure_;
}

bool PendingCommunication::is_over() {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (is_over_) {
      return true;
    }
  }
  if (!submitted_->is_over() || !end_.query()) {
    return false;
  }
  {
    const std::lock_guard<std::mutex> guard(lock_);
    is_over_ = true;
  }
  release_tensors();
  return true;
}

void PendingCommunication::release_tensors() noexcept {
  std::vector<at::Tensor> released; // without the lock: their memory can be needed elsewhere
  const std::lock_guard<std::mutex> guard(lock_);
  released.swap(tensors_);
}

void PendingCommunication::block_current_stream() {
  const c10::Stream stream = current_stream(device());
  {
    const GilReleased released;
    submitted_->wait();
  }
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (failure_ == nullptr && std::find(waiting_.begin(), waiting_.end(), stream) == waiting_.end()) {
      waiting_.push_back(stream);
    }
  }
  if (const auto error = failure()) {
    std::rethrow_exception(error);
  }
  end_.block(stream);
  if (stream == issued_on_) { // its later work, which can use the memory again, comes after the communication
    release_tensors();
  }
}

void PendingCommunication::wait_on_host(std::chrono::milliseconds timeout) {
  constexpr auto kFirstPause = std::chrono::microseconds(10), kLastPause = std::chrono::microseconds(1000);
  const auto deadline = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
  const GilReleased released;
  for (auto pause = kFirstPause; !is_over(); pause = std::min(2 * pause, kLastPause)) {
    TORCH_CHECK_WITH(
        DistBackendError, Clock::now() < deadline, id_.name, " did not finish within ", timeout.count(), " ms on rank ",
        id_.member.rank, " of ", id_.member.size, " (group '", id_.member.group, "')");
    std::this_thread::sleep_for(pause);
  }
  if (const auto error = failure()) {
    std::rethrow_exception(error);
  }
}

} // namespace backplane
