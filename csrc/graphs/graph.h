// Work that a stream was given once, and is given again in one call: captured by streams/capture.h, replayed here.
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

// One graph; the names and what they do are torch.cuda.CUDAGraph's. Its memory comes from a pool of its own, or from one that
// was given, and stays where it is until `reset`: each replay uses the same addresses.
class Graph {
 public:
  explicit Graph(bool keep_graph) : keep_graph_(keep_graph) {}
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // On the current stream of the current device, which must not be the default one. pool (0, 0): a new one.
  void capture_begin(c10::MempoolId_t pool, CaptureMode mode);
  void capture_end();
  // What has been captured is ready to be replayed; capture_end calls it, unless the graph was made with `keep_graph`.
  void instantiate();
  // Gives the work to the current stream of the graph's device, and what may run beside it to queues of its own, which the
  // stream then waits for. Takes no GIL, unless the device does.
  void replay();
  // Forgets the work and gives up the memory: the pool goes back to the device as soon as no tensor lives in it.
  void reset();
  c10::MempoolId_t pool() const;

  void enable_debug_mode() {
    debug_ = true;
  }
  // Writes the work as a graph in the dot language.
  void debug_dump(const std::string& path) const;

  // Pieces of work.
  size_t size() const;

 private:
  void check_captured(const char* what) const;
  void replay_branches(
      Device& owner, c10::Stream stream, c10::ArrayRef<PhiloxGenerator::State> generators);
  void instantiate_native(); // native_ stays null where the device offers no graph for these commands
  void replay_commands(c10::Stream stream, c10::ArrayRef<PhiloxGenerator::State> generators);
  void replay_native(c10::Stream stream, c10::ArrayRef<PhiloxGenerator::State> generators);
  void make_events();
  void destroy_events() noexcept;
  void give_up_memory();

  const bool keep_graph_;
  bool debug_ = false;
  bool ready_ = false;
  std::optional<c10::Stream> stream_; // that is being captured, or was
  std::shared_ptr<Capture> capture_; // under way
  std::optional<CapturedGraph> graph_;
  Branches branches_;
  std::vector<EventHandle> events_; // of each node, nullptr where nobody waits for it; the last one is that of the begin
  // The device's own graph, of `native_commands_`, which refer to graph_ and to `native_callbacks_`. Null: the commands are
  // submitted one by one.
  std::unique_ptr<NativeGraph> native_;
  std::vector<GraphCommand> native_commands_;
  std::deque<Command> native_callbacks_;
  std::shared_ptr<std::atomic<c10::StreamId>> native_stream_; // of the latest replay
  std::optional<c10::MempoolId_t> pool_; // while this holds it
};

} // namespace backplane
