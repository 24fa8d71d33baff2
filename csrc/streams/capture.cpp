#include "streams/capture.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "devices/operator_scope.h"

namespace backplane {
namespace {

struct Table {
  std::mutex lock;
  std::map<uint64_t, std::shared_ptr<Capture>> captures; // active captures, by number
  uint64_t next = 1;
};

Table& table() {
  static auto* instance = new Table;
  return *instance;
}

uint64_t next_number() {
  std::lock_guard<std::mutex> guard(table().lock);
  return table().next++;
}

constexpr const char* kOver =
    "the event was recorded during a graph capture that has ended, so nothing can wait for it";

std::string name_of(c10::Stream stream) {
  return c10::str("stream ", stream.id(), " of bp:", static_cast<int>(stream.device_index()));
}

} // namespace

Capture::Capture(c10::Stream stream, CaptureMode mode)
    : number_(next_number()), origin_(stream), mode_(mode), thread_(std::this_thread::get_id()) {
  streams_[stream.id()];
}

std::shared_ptr<Capture> Capture::begin(c10::Stream stream, CaptureMode mode) {
  TORCH_CHECK(of(stream) == nullptr, name_of(stream), " is already being captured: captures cannot be nested");
  std::shared_ptr<Capture> capture(new Capture(stream, mode));
  std::lock_guard<std::mutex> guard(table().lock);
  table().captures.emplace(capture->number_, capture);
  active_count_ += 1;
  return capture;
}

CapturedGraph Capture::end() {
  {
    std::lock_guard<std::mutex> guard(table().lock);
    table().captures.erase(number_);
    active_count_ -= 1;
  }
  std::lock_guard<std::mutex> guard(lock_);
  TORCH_CHECK(failure_.empty(), "no graph was captured because the capture failed: ", failure_);
  auto& waited_for = streams_[origin_.id()].seen;
  for (const auto& [id, state] : streams_) {
    if (id != origin_.id()) {
      TORCH_CHECK(
          waited_for[id] == state.nodes.size(), "no graph was captured because stream ", id,
          " joined the capture, but stream ", origin_.id(),
          ", on which the capture began, has not waited for all of its work");
    }
  }
  return std::move(graph_);
}

std::shared_ptr<Capture> Capture::find(c10::Stream stream) {
  std::lock_guard<std::mutex> guard(table().lock);
  for (const auto& [number, capture] : table().captures) {
    if (capture->contains(stream)) {
      return capture;
    }
  }
  return nullptr;
}

std::shared_ptr<Capture> Capture::find_forbidding(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> guard(table().lock);
  for (const auto& [number, capture] : table().captures) {
    const bool forbids = capture->mode_ == CaptureMode::Global ||
        (capture->mode_ == CaptureMode::ThreadLocal && capture->thread_ == std::this_thread::get_id());
    if (forbids && capture->origin_.device_index() == device) {
      return capture;
    }
  }
  return nullptr;
}

std::shared_ptr<Capture> Capture::numbered(uint64_t number) {
  std::lock_guard<std::mutex> guard(table().lock);
  const auto found = table().captures.find(number);
  return found == table().captures.end() ? nullptr : found->second;
}

bool Capture::contains(c10::Stream stream) {
  if (stream.device_index() != origin_.device_index()) {
    return false;
  }
  std::lock_guard<std::mutex> guard(lock_);
  return streams_.find(stream.id()) != streams_.end();
}

void Capture::add(
    c10::Stream stream, const Command& command, c10::ArrayRef<RandomNumber> random, const c10::Storage& pinned) {
  check_not_failed();
  std::lock_guard<std::mutex> guard(lock_);
  auto& state = streams_[stream.id()];
  std::vector<size_t> after;
  for (const auto& [id, count] : state.seen) {
    if (count > state.seen_before[id] || (id == stream.id() && count > 0)) {
      after.push_back(streams_[id].nodes[count - 1]);
    }
  }
  state.seen_before = state.seen;
  state.nodes.push_back(graph_.nodes.size());
  state.seen[stream.id()] = state.nodes.size();
  graph_.nodes.push_back(
      {OperatorScope::name(), stream.id(), std::move(after), StoredCommand(command), random.vec(), pinned});
}

void Capture::note_reporting() {
  std::lock_guard<std::mutex> guard(lock_);
  graph_.reports_errors = true;
}

void Capture::hold(std::shared_ptr<const void> needed) {
  std::lock_guard<std::mutex> guard(lock_);
  if (graph_.held.empty() || graph_.held.back() != needed) {
    graph_.held.push_back(std::move(needed));
  }
}

std::pair<uint32_t, uint64_t> Capture::take_random(const at::Generator& generator, uint64_t count) {
  std::lock_guard<std::mutex> guard(lock_);
  auto& all = graph_.generators;
  auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.generator == generator; });
  if (found == all.end()) {
    found = all.insert(all.end(), {generator, 0});
  }
  const uint64_t before = found->used;
  found->used += count;
  return {static_cast<uint32_t>(found - all.begin()), before};
}

std::shared_ptr<const CapturedPoint> Capture::point(c10::Stream stream) {
  check_not_failed();
  std::lock_guard<std::mutex> guard(lock_);
  return std::make_shared<const CapturedPoint>(CapturedPoint{number_, streams_[stream.id()].seen});
}

void Capture::wait(const CapturedPoint& point, c10::Stream stream) {
  const auto capture = numbered(point.capture);
  TORCH_CHECK(capture != nullptr, kOver);
  const auto own = of(stream);
  if (stream.device_index() != capture->origin_.device_index()) {
    capture->refuse(
        c10::str(name_of(stream), " cannot join a capture of bp:", static_cast<int>(capture->origin_.device_index())));
  }
  if (own != nullptr && own != capture) {
    capture->refuse(c10::str(name_of(stream), " is in another capture"));
  }
  std::lock_guard<std::mutex> guard(capture->lock_);
  auto& seen = capture->streams_[stream.id()].seen;
  for (const auto& [id, count] : point.seen) {
    seen[id] = std::max(seen[id], count);
  }
}

void Capture::refuse(const CapturedPoint& point, const std::string& why) {
  const auto capture = numbered(point.capture);
  TORCH_CHECK(capture != nullptr, kOver);
  capture->refuse(why);
}

void Capture::refuse(const std::string& why) {
  const std::string name = OperatorScope::name();
  const std::string text = c10::str(name.empty() ? "this call" : name, " cannot be captured in a graph: ", why);
  {
    std::lock_guard<std::mutex> guard(lock_);
    if (failure_.empty()) {
      failure_ = text;
    }
  }
  TORCH_CHECK(false, text);
}

void Capture::check_not_failed() {
  std::lock_guard<std::mutex> guard(lock_);
  TORCH_CHECK(failure_.empty(), "the capture has failed: ", failure_);
}

} // namespace backplane
