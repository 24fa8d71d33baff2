// Graphs: commands that are captured from a stream once (streams/capture.h) and replayed here in one call.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "c10/generator.h"
#include "devices/device.h"
#include "graphs/branches.h"
#include "streams/capture.h"

namespace backplane {

// A graph with the interface of torch.cuda.CUDAGraph. Its memory comes from its own pool or from a given one, and stays
// allocated until `reset`: every replay uses the same addresses.
class Graph {
 public:
  explicit Graph(bool keep_graph) : keep_graph_(keep_graph) {}
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Begins a capture on the current stream, which must not be the default stream. pool (0, 0): a new pool.
  void capture_begin(c10::MempoolId_t pool, CaptureMode mode);
  void capture_end();
  // Prepares the captured commands for replay. capture_end calls this, unless the graph was made with `keep_graph`.
  void instantiate();
  // Submits the commands to the current stream of the graph's device. Concurrent branches go to other queues, which the
  // stream then waits for. Does not acquire the GIL unless the device does.
  void replay();
  // Drops the commands and releases the pool. Its memory returns to the device once no tensor uses it.
  void reset();
  c10::MempoolId_t pool() const;

  void enable_debug_mode() {
    debug_ = true;
  }
  // Writes the commands and their dependencies in the dot language.
  void debug_dump(const std::string& path) const;

  // The number of commands.
  size_t size() const;

 private:
  void check_captured(const char* what) const;
  void replay_branches(Device& owner, c10::Stream stream, c10::ArrayRef<PhiloxGenerator::State> generators);
  void instantiate_native(); // native_ stays null if the device cannot make a graph of these commands
  void replay_commands(c10::Stream stream, c10::ArrayRef<PhiloxGenerator::State> generators);
  void replay_native(c10::Stream stream, c10::ArrayRef<PhiloxGenerator::State> generators);
  void make_events();
  void destroy_events() noexcept;
  void give_up_memory();

  const bool keep_graph_;
  bool debug_ = false;
  bool ready_ = false;
  std::optional<c10::Stream> stream_; // the captured stream
  std::shared_ptr<Capture> capture_; // null unless the graph is being captured
  std::optional<CapturedGraph> graph_;
  Branches branches_;
  std::vector<EventHandle> events_; // for each node, nullptr if no queue waits for it; the last one marks the begin
  // The device's graph of `native_commands_`, which refer to graph_ and `native_callbacks_`. Null: replays submit the
  // commands one by one.
  std::unique_ptr<NativeGraph> native_;
  std::vector<GraphCommand> native_commands_;
  std::deque<Command> native_callbacks_;
  std::shared_ptr<std::atomic<c10::StreamId>> native_stream_; // of the latest replay
  std::optional<c10::MempoolId_t> pool_; // while the graph holds a reference to it
};

} // namespace backplane
