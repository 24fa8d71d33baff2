#include "graphs/graph.h"

#include <c10/util/Exception.h>

#include <fstream>
#include <mutex>
#include <utility>

#include "c10/generator.h"
#include "devices/profile.h"
#include "fallback/deferred.h"
#include "memory/allocator.h"
#include "memory/caching_allocator.h"
#include "memory/pinned.h"
#include "streams/device_errors.h"
#include "streams/stream.h"

namespace backplane {
namespace {

// Gives captured work to a stream.
class Replay {
 public:
  Replay(c10::Stream stream, c10::ArrayRef<PhiloxGenerator::State> generators)
      : stream_(stream), queue_(stream_handle(stream)), device_(device(stream.device_index())), generators_(generators) {}

  void operator()(const CapturedLaunch& launch) const {
    give(launch.arguments, [&](c10::ArrayRef<KernelArgument> arguments) {
      launch.kernel->launch(launch.size, arguments, queue_);
    });
  }

  void operator()(const CapturedQueueCall& call) const {
    give(call.arguments, [&](c10::ArrayRef<KernelArgument> arguments) {
      const ProfiledCommand profiled(
          Activity::Kind::Library, stream_.device_index(), queue_, call.function->name());
      device_.call_on_queue(call.function, call.caller, arguments, queue_);
    });
  }

  void operator()(const CapturedCopy& copy) const {
    const ProfiledCommand profiled(stream_.device_index(), queue_, copy.kind, copy.bytes);
    device_.copy(copy.destination, copy.source, copy.bytes, copy.kind, queue_);
    if (copy.pinned) {
      const auto& pointer = copy.pinned.data_ptr();
      pinned_allocator().record_event(pointer.get(), pointer.get_context(), stream_);
    }
  }

  void operator()(const CapturedHostWork& work) const {
    RandomState random{};
    if (work.draw.has_value()) {
      const auto& state = generators_[work.draw->generator];
      random = {state.seed, state.offset + work.draw->beyond};
    }
    work.give(stream_, random);
  }

 private:
  // Calls `go` with the arguments, in which random numbers are this replay's.
  template <typename Go>
  void give(const CapturedArguments& captured, const Go& go) const {
    if (captured.random.empty()) {
      go(captured.arguments);
      return;
    }
    c10::SmallVector<KernelArgument, 24> arguments(captured.arguments.begin(), captured.arguments.end());
    c10::SmallVector<uint64_t, 4> numbers(captured.random.size());
    for (size_t i = 0; i < numbers.size(); ++i) {
      const RandomNumber& number = captured.random[i];
      const auto& state = generators_[number.generator];
      const uint64_t value = number.is_offset ? state.offset + number.beyond : state.seed;
      arguments[number.argument].bytes = store_number(static_cast<int64_t>(value), number.dtype, &numbers[i]);
      arguments[number.argument].data = &numbers[i];
    }
    go(arguments);
  }

  const c10::Stream stream_;
  const StreamHandle queue_;
  Device& device_;
  const c10::ArrayRef<PhiloxGenerator::State> generators_;
};

std::string described(const CapturedLaunch& launch) {
  const auto& [items, group] = launch.size;
  return c10::str(
      launch.kernel->entry(), "\\n", items[0], " × ", items[1], " × ", items[2], " work items in groups of ", group[0],
      " × ", group[1], " × ", group[2]);
}

std::string described(const CapturedQueueCall& call) {
  return call.function->name();
}

std::string described(const CapturedCopy& copy) {
  const char* kind = copy.kind == CopyKind::WithinDevice ? "within the device"
      : copy.kind == CopyKind::HostToDevice              ? "from pinned memory"
                                                         : "to pinned memory";
  return c10::str("copy of ", copy.bytes, " bytes ", kind);
}

std::string described(const CapturedHostWork& work) {
  return c10::str("on the host: ", work.name);
}

// As it stands between quotation marks in the dot language, where \n is a line's end.
std::string quoted(const std::string& text) {
  std::string found;
  for (const char c : text) {
    found += c == '"' ? std::string("'") : std::string(1, c);
  }
  return "\"" + found + "\"";
}

} // namespace

Graph::~Graph() {
  if (in_bad_fork()) {
    return;
  }
  try {
    if (capture_ != nullptr) {
      device_allocator(stream_->device_index()).end_allocate_to_pool(*pool_);
      capture_->end();
    }
  } catch (const std::exception&) {
    // Nobody wants the graph.
  }
  give_up_memory();
}

void Graph::capture_begin(c10::MempoolId_t pool, CaptureMode mode) {
  TORCH_CHECK(
      capture_ == nullptr && !graph_.has_value(),
      "this graph ", capture_ != nullptr ? "is being captured" : "has been captured",
      " already; to capture another, make another graph or reset() this one");
  const c10::Stream stream = current_stream(current_device());
  const auto index = stream.device_index();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !device(index).properties().dialect.empty() || can_defer(index), "bp:", static_cast<int>(index), " (",
      device(index).properties().name,
      ") runs no kernels, and the host cannot compute in its memory: graphs are captured on devices where one of the two holds");
  TORCH_CHECK(
      stream != default_stream(index),
      "graphs must be captured on a stream that is not the default one; they can be replayed on any");
  default_generator(index); // is seeded when it is made, which nobody may do in a capture
  auto capture = Capture::begin(stream, mode);
  const bool fresh = pool == c10::MempoolId_t{0, 0};
  pool_ = fresh ? new_pool_id(/*made_by_user=*/false) : pool;
  device_allocator(index).begin_allocate_to_pool(*pool_, [capture, index](c10::StreamId id) {
    return capture->contains(c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, index), id));
  });
  stream_ = stream;
  capture_ = std::move(capture);
}

void Graph::capture_end() {
  TORCH_CHECK(capture_ != nullptr, "capture_end() ends a capture, and this graph is in none: call capture_begin() first");
  const auto capture = std::exchange(capture_, nullptr);
  device_allocator(stream_->device_index()).end_allocate_to_pool(*pool_);
  try {
    graph_ = capture->end();
  } catch (const std::exception&) {
    give_up_memory();
    throw;
  }
  if (!keep_graph_) {
    instantiate();
  }
}

void Graph::instantiate() {
  check_captured("instantiate()");
  ready_ = true;
}

void Graph::replay() {
  check_captured("replay()");
  if (!ready_) {
    instantiate();
  }
  const c10::Stream stream = current_stream(stream_->device_index());
  if (const auto capture = Capture::of(stream)) {
    capture->refuse("it replays another graph");
  }
  std::vector<PhiloxGenerator::State> states;
  for (CapturedGenerator& one : graph_->generators) {
    std::lock_guard<std::mutex> held(one.generator.mutex());
    states.push_back(one.generator.get<PhiloxGenerator>()->advance(one.used));
  }
  const Replay replay(stream, states);
  const DeviceCall call(device(stream.device_index()));
  for (const CapturedNode& node : graph_->nodes) {
    std::visit(replay, node.work);
  }
  if (graph_->reports_errors) {
    note_reporting_launch(stream);
  }
}

void Graph::reset() {
  TORCH_CHECK(capture_ == nullptr, "a graph cannot be reset while it is being captured");
  graph_.reset();
  ready_ = false;
  give_up_memory();
}

c10::MempoolId_t Graph::pool() const {
  TORCH_CHECK(pool_.has_value(), "pool() tells the memory of a graph, and this one has been given none: capture it first");
  return *pool_;
}

void Graph::debug_dump(const std::string& path) const {
  TORCH_CHECK(debug_, "call enable_debug_mode() before debug_dump()");
  check_captured("debug_dump()");
  std::ofstream file(path);
  file << "digraph graph_of_bp_" << static_cast<int>(stream_->device_index()) << " {\n  node [shape=box];\n";
  for (size_t i = 0; i < graph_->nodes.size(); ++i) {
    const CapturedNode& node = graph_->nodes[i];
    const std::string work = std::visit([](const auto& one) { return described(one); }, node.work);
    file << "  n" << i << " [label=" << quoted(c10::str(node.operator_name, "\\n", work, "\\nstream ", node.stream))
         << "];\n";
    for (const size_t before : node.after) {
      file << "  n" << before << " -> n" << i << ";\n";
    }
  }
  file << "}\n";
  file.close();
  TORCH_CHECK(file.good(), "the graph could not be written to ", path);
}

size_t Graph::size() const {
  return graph_.has_value() ? graph_->nodes.size() : 0;
}

void Graph::check_captured(const char* what) const {
  TORCH_CHECK(
      graph_.has_value(), what, " needs a graph that has been captured, and this one ",
      capture_ != nullptr ? "is being captured: call capture_end() first" : "has not been");
}

void Graph::give_up_memory() {
  if (pool_.has_value()) {
    device_allocator(stream_->device_index()).release_pool(*pool_);
    pool_.reset();
  }
}

} // namespace backplane
