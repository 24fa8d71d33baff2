#include "distributed/channel.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "devices/device.h"
#include "streams/stream.h"

namespace backplane {

Channel::Channel(c10::DeviceIndex index, Join join, Failed failed)
    : join_(std::move(join)),
      failed_(std::move(failed)),
      stream_(pool_stream(index, kGreatestPriority)),
      queue_(native_handle(stream_)) {}

Channel::~Channel() {
  abort();
  end_calls();
}

void Channel::end_calls() {
  calls_.finish();
}

void Channel::add(const Pending& communication) {
  bool begins = false;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    begins = !std::exchange(has_begun_, true);
    open_.push_back(communication);
  }
  if (begins) {
    calls_.add([this, deadline = communication->deadline()] { join_group(deadline); });
  } else if (calls_.empty()) {
    submit(communication);
    return;
  }
  calls_.add([this, communication] { submit(communication); });
}

void Channel::join_group(Deadline deadline) {
  std::shared_ptr<Communicator> made;
  std::exception_ptr error;
  try {
    made = join_(deadline);
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  Pending first;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (is_aborted_ && made != nullptr) {
      made->abort();
    }
    communicator_ = std::move(made);
    first = open_.empty() ? nullptr : open_.front();
  }
  if (error != nullptr && first != nullptr) {
    failed_(first, error);
  }
}

void Channel::submit(const Pending& communication) {
  try {
    const auto used = communicator();
    TORCH_CHECK(used != nullptr, "the communicator was not made");
    communication->submit(*used, stream_, queue_);
  } catch (const std::exception&) {
    failed_(communication, std::current_exception());
  }
}

std::shared_ptr<Communicator> Channel::communicator() {
  const std::lock_guard<std::mutex> guard(lock_);
  return communicator_;
}

std::vector<Channel::Pending> Channel::open() {
  std::vector<Pending> known;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    known = open_;
  }
  std::vector<Pending> over;
  for (const auto& one : known) {
    if (!one->is_over()) {
      break; // the later ones are not over, either
    }
    over.push_back(one);
  }
  const std::lock_guard<std::mutex> guard(lock_);
  open_.erase(
      std::remove_if(
          open_.begin(), open_.end(),
          [&](const Pending& one) { return std::find(over.begin(), over.end(), one) != over.end(); }),
      open_.end());
  return open_;
}

std::string Channel::failure() {
  const auto used = communicator();
  return used == nullptr ? std::string() : used->failure();
}

void Channel::fail(const std::string& reason) noexcept {
  std::vector<Pending> failed;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    failed.swap(open_);
  }
  for (const auto& one : failed) { // before abort(), which lets the streams go on
    one->fail(reason);
  }
  abort();
}

void Channel::abort() noexcept {
  const std::lock_guard<std::mutex> guard(lock_);
  is_aborted_ = true;
  if (communicator_ != nullptr) {
    communicator_->abort();
  }
}

void Channel::finish(Deadline deadline) {
  if (const auto used = communicator()) {
    used->finish(deadline);
  }
}

} // namespace backplane
