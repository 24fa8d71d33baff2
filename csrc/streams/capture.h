// The commands that streams receive while a graph is being captured. They are stored here, and not executed.
//
// A capture begins on one stream. Another stream joins it by waiting for an event that was recorded in it, and must be waited for
// in turn before the capture ends. The order of submission is one in which the commands can be executed, so a graph is a list
// of commands with dependencies.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "devices/command.h"

namespace backplane {

// Who may wait for the device while a graph is captured on one of its streams: no thread, any but the one that captures, or
// any (then only for streams that are not captured).
enum class CaptureMode : uint8_t { Global, ThreadLocal, Relaxed };

// How far a stream had come when an event was recorded on it.
struct CapturedPoint {
  uint64_t capture; // its number
  std::map<c10::StreamId, size_t> seen; // of each stream, how many pieces of its work come before
};

// A number of a command that differs in each replay: a generator's seed, or its offset.
struct RandomNumber {
  uint32_t index; // into the arguments of a launch or a library call, into the numbers of a host callback
  c10::ScalarType dtype;
  uint32_t generator; // index into CapturedGraph::generators
  bool is_offset;
  uint64_t beyond; // how far the offset is beyond the generator's at the replay
};

struct CapturedNode {
  std::string operator_name;
  c10::StreamId stream;
  std::vector<size_t> after; // the nodes that this one depends on, without those that they depend on
  StoredCommand command;
  std::vector<RandomNumber> random;
  c10::Storage pinned; // the host's side of a copy, if there is one
};

struct CapturedGenerator {
  at::Generator generator;
  uint64_t used; // by how much its offset moves on with each replay
};

struct CapturedGraph {
  std::vector<CapturedNode> nodes;
  std::vector<CapturedGenerator> generators;
  std::vector<std::shared_ptr<const void>> held; // as long as it may be replayed
  bool reports_errors = false; // see device_errors.h
};

class Capture {
 public:
  // Throws where the stream is being captured already.
  static std::shared_ptr<Capture> begin(c10::Stream stream, CaptureMode mode);
  // What was captured; the streams are as they were before. Throws why there is no graph: something could not be captured, or
  // a stream that joined was not waited for.
  CapturedGraph end();

  // From 1, another one for each.
  uint64_t number() const {
    return number_;
  }
  // The capture that the stream is in; mostly none.
  static std::shared_ptr<Capture> of(c10::Stream stream) {
    return under_way_.load(std::memory_order_relaxed) == 0 ? nullptr : find(stream);
  }
  // One that does not let this thread wait for the device's streams; mostly none.
  static std::shared_ptr<Capture> forbidding(c10::DeviceIndex device) {
    return under_way_.load(std::memory_order_relaxed) == 0 ? nullptr : find_forbidding(device);
  }

  // A command for a stream that is in this capture.
  void add(
      c10::Stream stream, const Command& command, c10::ArrayRef<RandomNumber> random, const c10::Storage& pinned);
  // Launches may report errors, which replays have to look for.
  void note_reporting();
  // Keeps what the work needs.
  void hold(std::shared_ptr<const void> needed);
  // Index of the generator, and how far beyond its offset the next `count` numbers begin.
  std::pair<uint32_t, uint64_t> take_random(const at::Generator& generator, uint64_t count);

  // Events.
  std::shared_ptr<const CapturedPoint> point(c10::Stream stream);
  // The stream waits for the point: it joins, if it was in no capture. Throws where the point's capture is over.
  static void wait(const CapturedPoint& point, c10::Stream stream);
  bool contains(c10::Stream stream);

  // Throws that the operator under way cannot be captured, and why. The capture has failed: it says so when it ends.
  [[noreturn]] void refuse(const std::string& why);
  // The same, of the capture that a point is of, which may be over.
  [[noreturn]] static void refuse(const CapturedPoint& point, const std::string& why);

 private:
  Capture(c10::Stream stream, CaptureMode mode);
  static std::shared_ptr<Capture> find(c10::Stream stream);
  static std::shared_ptr<Capture> find_forbidding(c10::DeviceIndex device);
  static std::shared_ptr<Capture> numbered(uint64_t number);
  void check_not_failed();

  const uint64_t number_;
  const c10::Stream origin_;
  const CaptureMode mode_;
  const std::thread::id thread_;

  std::mutex lock_; // of what follows; threads of autograd give work, too
  struct StreamState {
    std::map<c10::StreamId, size_t> seen; // of each stream, how many pieces of its work come before the next one here
    std::map<c10::StreamId, size_t> seen_before; // the last one here
    std::vector<size_t> nodes; // that were given to this stream
  };
  std::map<c10::StreamId, StreamState> streams_; // that are in it
  CapturedGraph graph_;
  std::string failure_;

  static inline std::atomic<int> under_way_{0};
};

} // namespace backplane
