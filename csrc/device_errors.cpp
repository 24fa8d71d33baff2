#include "device_errors.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "device.h"
#include "stream.h"

namespace backplane {
namespace {

constexpr int32_t kIndexOutOfRange = 1; // INDEX_OUT_OF_RANGE of the Python side; any other code is a RuntimeError

struct Watched {
  std::mutex lock; // of `streams`; not held while the device is called
  std::vector<c10::StreamId> streams; // with launches that were not checked yet
  std::vector<std::pair<c10::StreamId, std::string>> reported; // by the host, see report_error
  std::atomic<bool> any{false}; // one of the two is not empty
  std::optional<at::Tensor> words; // set once
  ErrorText text;
};

Watched& watched(c10::DeviceIndex index) {
  static auto* all = new std::array<Watched, 64>;
  return (*all)[index];
}

void update(Watched& device_words) { // under the lock
  device_words.any.store(
      !device_words.streams.empty() || !device_words.reported.empty(), std::memory_order_release);
}

// Reads the words behind what the stream has to do, and throws what they say.
void check(Watched& device_words, c10::Stream stream) {
  const at::Tensor& words = *device_words.words;
  Device& owner = device(stream.device_index());
  const StreamHandle handle = stream_handle(stream);
  std::vector<int32_t> found(static_cast<size_t>(words.numel()));
  void* memory = words.mutable_data_ptr();
  const size_t bytes = words.nbytes();
  {
    DeviceCall call(owner);
    owner.copy(found.data(), memory, bytes, CopyKind::DeviceToHost, handle);
    owner.synchronize_stream(handle);
    if (found[0] == 0) {
      return;
    }
    owner.fill(memory, 0, bytes, handle);
  }
  const std::string text = device_words.text(found);
  TORCH_CHECK_INDEX(found[0] != kIndexOutOfRange, text);
  TORCH_CHECK(false, text);
}

} // namespace

void watch_error_words(const at::Tensor& words, ErrorText text) {
  Watched& device_words = watched(words.device().index());
  TORCH_CHECK(!device_words.words.has_value(), "the error words of ", words.device(), " are set already");
  device_words.text = std::move(text);
  device_words.words = words;
}

bool are_error_words(const at::Tensor& tensor) {
  const auto& words = watched(tensor.device().index()).words;
  return words.has_value() && words->storage().is_alias_of(tensor.storage());
}

void note_reporting_launch(c10::Stream stream) {
  Watched& device_words = watched(stream.device_index());
  std::lock_guard<std::mutex> guard(device_words.lock);
  auto& streams = device_words.streams;
  if (std::find(streams.begin(), streams.end(), stream.id()) == streams.end()) {
    streams.push_back(stream.id());
  }
  update(device_words);
}

void report_error(c10::Stream stream, std::string text) {
  Watched& device_words = watched(stream.device_index());
  std::lock_guard<std::mutex> guard(device_words.lock);
  device_words.reported.emplace_back(stream.id(), std::move(text));
  update(device_words);
}

namespace {

// Takes what is known of one stream, or of all (nullopt), and throws it. `checked_on`: where the words are read.
void throw_errors(Watched& device_words, std::optional<c10::StreamId> only, c10::Stream checked_on) {
  bool launched = false;
  std::string text;
  {
    std::lock_guard<std::mutex> guard(device_words.lock);
    const auto concerns = [&](c10::StreamId id) { return !only.has_value() || *only == id; };
    launched = std::erase_if(device_words.streams, concerns) > 0;
    std::erase_if(device_words.reported, [&](auto& one) {
      if (!concerns(one.first)) {
        return false;
      }
      if (text.empty()) {
        text = std::move(one.second); // the first: what follows it may be its consequence
      }
      return true;
    });
    update(device_words);
  }
  if (launched) {
    check(device_words, checked_on);
  }
  TORCH_CHECK(text.empty(), text);
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

} // namespace backplane
