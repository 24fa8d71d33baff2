// Graph capture: stores the commands that are submitted to the captured streams instead of executing them.
//
// A capture begins on one stream. Another stream joins by waiting for an event that was recorded in the capture, and
// the first stream must wait for it before the capture ends. A graph is a list of commands with dependencies. The list
// is in the order of submission, in which the commands can be executed.
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

// Which threads can wait for the device while a graph is captured on one of its streams. Global: none. ThreadLocal: all
// but the capturing thread. Relaxed: all, but only for streams that are not captured.
enum class CaptureMode : uint8_t { Global, ThreadLocal, Relaxed };

// The position of a stream when an event was recorded on it.
struct CapturedPoint {
  uint64_t capture; // the capture's number
  std::map<c10::StreamId, size_t> seen; // the number of commands of each stream that come before
};

// A number of a command that differs in each replay: a generator's seed, or its offset.
struct RandomNumber {
  uint32_t index; // into the arguments of a launch or a library call, into the numbers of a host callback
  c10::ScalarType dtype;
  uint32_t generator; // index into CapturedGraph::generators
  bool is_offset;
  uint64_t beyond; // is added to the generator's offset at the replay
};

struct CapturedNode {
  std::string operator_name;
  c10::StreamId stream;
  std::vector<size_t> after; // the nodes that this one directly depends on
  StoredCommand command;
  std::vector<RandomNumber> random;
  c10::Storage pinned; // the host memory of a copy, if any
};

struct CapturedGenerator {
  at::Generator generator;
  uint64_t used; // each replay advances the offset by this
};

struct CapturedGraph {
  std::vector<CapturedNode> nodes;
  std::vector<CapturedGenerator> generators;
  std::vector<std::shared_ptr<const void>> held; // kept alive while the graph can be replayed
  bool reports_errors = false; // see device_errors.h
};

class Capture {
 public:
  // Throws if the stream is already being captured.
  static std::shared_ptr<Capture> begin(c10::Stream stream, CaptureMode mode);
  // Ends the capture and returns the graph. Throws if something could not be captured, or if a stream that joined was
  // not waited for. The streams leave the capture in any case.
  CapturedGraph end();

  // Unique; starts at 1.
  uint64_t number() const {
    return number_;
  }
  // The capture that contains the stream; usually nullptr.
  static std::shared_ptr<Capture> of(c10::Stream stream) {
    return active_count_.load(std::memory_order_relaxed) == 0 ? nullptr : find(stream);
  }
  // A capture that forbids this thread to wait for the device's streams; usually nullptr.
  static std::shared_ptr<Capture> forbidding(c10::DeviceIndex device) {
    return active_count_.load(std::memory_order_relaxed) == 0 ? nullptr : find_forbidding(device);
  }

  // Adds a command for a stream in this capture.
  void add(c10::Stream stream, const Command& command, c10::ArrayRef<RandomNumber> random, const c10::Storage& pinned);
  // Notes that launches can report errors, for which replays must check.
  void note_reporting();
  // Keeps an object alive that commands need.
  void hold(std::shared_ptr<const void> needed);
  // Reserves `count` numbers. Returns the index of the generator, and where they begin relative to its offset.
  std::pair<uint32_t, uint64_t> take_random(const at::Generator& generator, uint64_t count);

  // Events.
  std::shared_ptr<const CapturedPoint> point(c10::Stream stream);
  // Makes the stream wait for the point. It joins the capture if it is in none. Throws if the point's capture has
  // ended.
  static void wait(const CapturedPoint& point, c10::Stream stream);
  bool contains(c10::Stream stream);

  // Throws that the current operator cannot be captured, and why. The capture fails, so end() throws, too.
  [[noreturn]] void refuse(const std::string& why);
  // The same for the capture of a point. Throws another error if it has ended.
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

  std::mutex lock_; // guards the members below: autograd threads submit commands, too
  struct StreamState {
    std::map<c10::StreamId, size_t> seen; // commands of each stream that come before the next one here
    std::map<c10::StreamId, size_t> seen_before; // like `seen`, for the last one here
    std::vector<size_t> nodes; // of this stream
  };
  std::map<c10::StreamId, StreamState> streams_; // the streams in this capture
  CapturedGraph graph_;
  std::string failure_;

  static inline std::atomic<int> active_count_{0};
};

} // namespace backplane
