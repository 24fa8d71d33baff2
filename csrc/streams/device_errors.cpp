#include "streams/device_errors.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>

#include "devices/device.h"
#include "streams/capture.h"
#include "streams/stream.h"

namespace backplane {
namespace {

struct Watched {
  std::mutex lock; // guards `streams` and `reported`; not held while the device is called
  std::vector<c10::StreamId> streams; // with unchecked launches
  std::vector<std::pair<c10::StreamId, std::exception_ptr>> reported; // by report_error
  std::atomic<bool> any{false}; // `streams` or `reported` is not empty
  std::optional<at::Tensor> words; // set once
  ReadWords read;
};

Watched& watched(c10::DeviceIndex index) {
  static auto* all = new std::array<Watched, 64>;
  return (*all)[index];
}

void update(Watched& device_words) { // the caller holds the lock
  device_words.any.store(!device_words.streams.empty() || !device_words.reported.empty(), std::memory_order_release);
}

// Reads the words after all work of the stream, and clears them. Returns an empty vector if there is no error. Throws
// only failures of the device.
std::vector<int32_t> take_words(const at::Tensor& words, c10::Stream stream) {
  Device& owner = device(stream.device_index());
  const StreamHandle handle = stream_handle(stream);
  auto found = std::make_unique<std::vector<int32_t>>(static_cast<size_t>(words.numel()));
  void* memory = words.mutable_data_ptr();
  const size_t bytes = words.nbytes();
  DeviceCall call(owner);
  try {
    owner.submit(Copy{found->data(), memory, bytes, CopyKind::DeviceToHost}, handle);
    owner.synchronize_stream(handle);
  } catch (const std::exception&) {
    static_cast<void>(found.release()); // the device may still write there
    throw;
  }
  if (found->at(0) == 0) {
    return {};
  }
  owner.submit(Fill{memory, 0, bytes}, handle);
  return std::move(*found);
}

} // namespace

void watch_error_words(const at::Tensor& words, ReadWords read) {
  Watched& device_words = watched(words.device().index());
  TORCH_CHECK(!device_words.words.has_value(), "the error words of ", words.device(), " are already set");
  device_words.read = std::move(read);
  device_words.words = words;
}

bool are_error_words(const at::Tensor& tensor) {
  const auto& words = watched(tensor.device().index()).words;
  return words.has_value() && words->storage().is_alias_of(tensor.storage());
}

void note_reporting_launch(c10::Stream stream) {
  if (const auto capture = Capture::of(stream); C10_UNLIKELY(capture != nullptr)) {
    capture->note_reporting();
    return;
  }
  Watched& device_words = watched(stream.device_index());
  std::lock_guard<std::mutex> guard(device_words.lock);
  auto& streams = device_words.streams;
  if (std::find(streams.begin(), streams.end(), stream.id()) == streams.end()) {
    streams.push_back(stream.id());
  }
  update(device_words);
}

void report_error(c10::Stream stream, std::exception_ptr error) {
  Watched& device_words = watched(stream.device_index());
  std::lock_guard<std::mutex> guard(device_words.lock);
  device_words.reported.emplace_back(stream.id(), std::move(error));
  update(device_words);
}

namespace {

[[noreturn]] void throw_error(const ReportedError& error) {
  TORCH_CHECK_INDEX(!error.is_index_error, error.text);
  TORCH_CHECK(false, error.text);
}

// Throws the first error of one stream, or of all (nullopt), and clears them. `checked_on` is the stream that reads the
// words.
void throw_errors(Watched& device_words, std::optional<c10::StreamId> only, c10::Stream checked_on) {
  std::vector<c10::StreamId> launched;
  std::vector<std::pair<c10::StreamId, std::exception_ptr>> reported;
  {
    std::lock_guard<std::mutex> guard(device_words.lock);
    const auto concerns = [&](c10::StreamId id) { return !only.has_value() || *only == id; };
    std::erase_if(
        device_words.streams, [&](c10::StreamId id) { return concerns(id) && (launched.push_back(id), true); });
    std::erase_if(device_words.reported, [&](auto& one) {
      return concerns(one.first) && (reported.push_back(std::move(one)), true);
    });
    update(device_words);
  }
  std::vector<int32_t> found;
  try {
    if (!launched.empty()) {
      found = take_words(*device_words.words, checked_on);
    }
  } catch (const std::exception&) { // the errors were not thrown: restore them
    std::lock_guard<std::mutex> guard(device_words.lock);
    device_words.streams.insert(device_words.streams.end(), launched.begin(), launched.end());
    device_words.reported.insert(device_words.reported.begin(), reported.begin(), reported.end());
    update(device_words);
    throw;
  }
  if (!found.empty()) {
    throw_error(device_words.read(found));
  }
  if (!reported.empty()) {
    std::rethrow_exception(reported.front().second); // later errors can be consequences of the first
  }
}

} // namespace

void throw_reported_errors(c10::Stream stream) {
  Watched& device_words = watched(stream.device_index());
  if (C10_UNLIKELY(device_words.any.load(std::memory_order_acquire))) {
    throw_errors(device_words, stream.id(), stream);
  }
}

void throw_reported_errors(c10::DeviceIndex index) {
  Watched& device_words = watched(index);
  if (C10_UNLIKELY(device_words.any.load(std::memory_order_acquire))) {
    throw_errors(device_words, std::nullopt, current_stream(index));
  }
}

ErrorCheck::ErrorCheck(c10::Stream stream) : stream_(stream) {
  Watched& device_words = watched(stream.device_index());
  if (C10_LIKELY(!device_words.any.load(std::memory_order_acquire))) {
    return;
  }
  {
    std::lock_guard<std::mutex> guard(device_words.lock);
    if (std::erase(device_words.streams, stream.id()) == 0) {
      return;
    }
    update(device_words);
  }
  words_ = std::make_unique<std::vector<int32_t>>(static_cast<size_t>(device_words.words->numel()));
  try {
    device(stream.device_index())
        .submit(
            Copy{words_->data(), device_words.words->data_ptr(), device_words.words->nbytes(), CopyKind::DeviceToHost},
            stream_handle(stream));
  } catch (...) {
    note_reporting_launch(stream);
    throw;
  }
}

ErrorCheck::~ErrorCheck() {
  if (words_ != nullptr) {
    static_cast<void>(words_.release()); // the device may still write there
    note_reporting_launch(stream_);
  }
}

void ErrorCheck::finish() {
  if (const auto words = std::move(words_); words != nullptr && words->at(0) != 0) {
    const Watched& device_words = watched(stream_.device_index());
    device(stream_.device_index())
        .submit(Fill{device_words.words->data_ptr(), 0, device_words.words->nbytes()}, stream_handle(stream_));
    throw_error(device_words.read(*words));
  }
  throw_reported_errors(stream_);
}

} // namespace backplane
