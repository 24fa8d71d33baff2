#include "graphs/graph.h"

#include <c10/util/Exception.h>

#include <fstream>
#include <mutex>
#include <utility>

#include "c10/generator.h"
#include "devices/compiled_kernel.h"
#include "devices/profile.h"
#include "fallback/deferred.h"
#include "memory/allocator.h"
#include "memory/caching_allocator.h"
#include "memory/pinned.h"
#include "streams/device_errors.h"
#include "streams/stream.h"
#include "streams/submit.h"

namespace backplane {
namespace {

// A captured command with the random numbers of one replay.
class WithRandomNumbers {
 public:
  WithRandomNumbers(
      const Command& command, c10::ArrayRef<RandomNumber> random, c10::ArrayRef<PhiloxGenerator::State> generators)
      : command_(command) {
    std::visit([&](auto& one) { replace(one, random, generators); }, command_);
  }
  WithRandomNumbers(const WithRandomNumbers&) = delete;
  WithRandomNumbers& operator=(const WithRandomNumbers&) = delete;

  const Command& command() const {
    return command_;
  }

 private:
  static int64_t value_of(const RandomNumber& number, c10::ArrayRef<PhiloxGenerator::State> generators) {
    const auto& state = generators[number.generator];
    return static_cast<int64_t>(number.is_offset ? state.offset + number.beyond : state.seed);
  }

  template <typename Kind>
  void replace(Kind& command, c10::ArrayRef<RandomNumber> random, c10::ArrayRef<PhiloxGenerator::State> generators) {
    if constexpr (requires { command.arguments; }) {
      arguments_.append(command.arguments.begin(), command.arguments.end());
      numbers_.resize(random.size());
      for (size_t i = 0; i < random.size(); ++i) {
        const uint32_t bytes = store_number(value_of(random[i], generators), random[i].dtype, &numbers_[i]);
        arguments_[random[i].index] = {&numbers_[i], bytes};
      }
      command.arguments = arguments_;
    } else if constexpr (requires { command.numbers; }) {
      numbers_.append(command.numbers.begin(), command.numbers.end());
      for (const RandomNumber& one : random) {
        store_number(value_of(one, generators), one.dtype, &numbers_[one.index]);
      }
      command.numbers = numbers_;
    } else {
      TORCH_INTERNAL_ASSERT(false, "a command without numbers");
    }
  }

  Command command_; // its arrays are these:
  c10::SmallVector<KernelArgument, 24> arguments_;
  c10::SmallVector<uint64_t, 8> numbers_;
};

// Submits captured commands to a stream.
class Replay {
 public:
  Replay(c10::Stream stream, c10::ArrayRef<PhiloxGenerator::State> generators)
      : stream_(stream), queue_(stream_handle(stream)), generators_(generators) {}

  void run(const CapturedNode& node) const {
    const Command& command = node.command.command();
    if (C10_LIKELY(node.random.empty())) {
      submit_now(stream_, queue_, command);
    } else {
      submit_now(stream_, queue_, WithRandomNumbers(command, node.random, generators_).command());
    }
    if (node.pinned) {
      const auto& pointer = node.pinned.data_ptr();
      pinned_allocator().record_event(pointer.get(), pointer.get_context(), stream_);
    }
  }

 private:
  const c10::Stream stream_;
  const StreamHandle queue_;
  const c10::ArrayRef<PhiloxGenerator::State> generators_;
};

// A host function of a native graph. Its exceptions go to the stream of the latest replay.
class ReplayedFunction final : public HostFunction {
 public:
  ReplayedFunction(
      std::shared_ptr<const HostFunction> function,
      c10::Stream captured,
      std::shared_ptr<const std::atomic<c10::StreamId>> stream)
      : function_(std::move(function)), captured_(captured), stream_(std::move(stream)) {}

  void run(char* const* memory, const uint64_t* numbers) const override {
    const c10::Stream stream(c10::Stream::UNSAFE, captured_.device(), stream_->load());
    guarded(function_, stream)->run(memory, numbers);
  }
  const std::string& name() const override {
    return function_->name();
  }

 private:
  const std::shared_ptr<const HostFunction> function_;
  const c10::Stream captured_;
  const std::shared_ptr<const std::atomic<c10::StreamId>> stream_;
};

// Whether the device's streams run concurrently. Most host devices execute their streams in the calling thread.
bool has_queues(c10::DeviceIndex index) {
  return !can_defer(index) || device(index).defers_operators();
}

// Makes queue 0 wait for the other queues after a failed replay, as far as possible.
void join(Device& device, c10::ArrayRef<StreamHandle> queues) noexcept {
  for (const StreamHandle queue : queues.slice(1)) {
    try {
      const EventHandle event = device.create_event(/*timing=*/false);
      device.submit(EventRecord{event}, queue);
      device.submit(EventWait{event}, queues[0]);
      device.destroy_event(event);
    } catch (const std::exception&) {
      // Ignored: the caller rethrows the error of the replay.
    }
  }
}

// Quotes text for the dot language, in which \n is a line break.
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
    // Ignored: the graph is not used.
  }
  destroy_events();
  native_.reset(); // before its memory is released
  give_up_memory();
}

void Graph::capture_begin(c10::MempoolId_t pool, CaptureMode mode) {
  TORCH_CHECK(
      capture_ == nullptr && !graph_.has_value(), "this graph ",
      capture_ != nullptr ? "is being captured" : "has been captured",
      " already; create another graph, or reset() this one first");
  const c10::Stream stream = current_stream(current_device());
  const auto index = stream.device_index();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !device(index).properties().dialect.empty() || can_defer(index), "bp:", static_cast<int>(index), " (",
      device(index).properties().name,
      ") runs no kernels, and the host cannot access its memory: graphs cannot be captured on such a device");
  TORCH_CHECK(
      stream != default_stream(index),
      "graphs must be captured on a non-default stream; they can be replayed on any stream");
  default_generator(index); // create it now: it is seeded then, which is not allowed in a capture
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
  TORCH_CHECK(capture_ != nullptr, "capture_end() needs a graph that is being captured; call capture_begin() first");
  const auto capture = std::exchange(capture_, nullptr);
  device_allocator(stream_->device_index()).end_allocate_to_pool(*pool_);
  try {
    graph_ = capture->end();
  } catch (const std::exception&) {
    give_up_memory();
    throw;
  }
  if (has_queues(stream_->device_index())) {
    branches_ = find_branches(graph_->nodes, 1 + kBranchStreams);
  }
  if (!keep_graph_) {
    instantiate();
  }
}

void Graph::instantiate() {
  check_captured("instantiate()");
  if (!ready_) {
    instantiate_native();
    if (branches_.queues > 1) {
      make_events();
    }
  }
  ready_ = true;
}

void Graph::instantiate_native() {
  native_commands_.clear();
  native_callbacks_.clear();
  native_stream_ = std::make_shared<std::atomic<c10::StreamId>>(stream_->id());
  for (const CapturedNode& node : graph_->nodes) {
    const Command* command = &node.command.command();
    if (const auto* callback = std::get_if<HostCallback>(command)) {
      if (!node.random.empty()) {
        return; // a native graph cannot change a callback's numbers at a replay
      }
      command = &native_callbacks_.emplace_back(
          HostCallback{
              std::make_shared<ReplayedFunction>(callback->function, *stream_, native_stream_), callback->memory,
              callback->numbers});
    }
    native_commands_.push_back({command, node.after});
  }
  native_ = device(stream_->device_index()).instantiate(native_commands_);
}

void Graph::replay_native(c10::Stream stream, c10::ArrayRef<PhiloxGenerator::State> generators) {
  native_stream_->store(stream.id());
  std::vector<GraphCommand> commands;
  std::deque<WithRandomNumbers> changed;
  if (!generators.empty()) {
    commands = native_commands_;
    for (size_t i = 0; i < commands.size(); ++i) {
      const CapturedNode& node = graph_->nodes[i];
      if (!node.random.empty()) {
        commands[i].command = &changed.emplace_back(*commands[i].command, node.random, generators).command();
      }
    }
  }
  native_->launch(changed.empty() ? native_commands_ : commands, !changed.empty(), stream_handle(stream));
}

void Graph::make_events() {
  Device& owner = device(stream_->device_index());
  const DeviceCall call(owner);
  try {
    for (const Branches::Step& step : branches_.steps) {
      events_.push_back(step.is_waited_for ? owner.create_event(/*timing=*/false) : nullptr);
    }
    events_.push_back(owner.create_event(/*timing=*/false));
  } catch (const std::exception&) {
    destroy_events();
    throw;
  }
}

void Graph::destroy_events() noexcept {
  for (const EventHandle event : events_) {
    if (event != nullptr) {
      device(stream_->device_index()).destroy_event(event);
    }
  }
  events_.clear();
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
  if (native_ != nullptr && !Profile::is_active()) { // a profile records each command
    replay_native(stream, states);
  } else {
    replay_commands(stream, states);
  }
  if (graph_->reports_errors) {
    note_reporting_launch(stream);
  }
}

void Graph::replay_commands(c10::Stream stream, c10::ArrayRef<PhiloxGenerator::State> states) {
  Device& owner = device(stream.device_index());
  const DeviceCall call(owner);
  if (branches_.queues == 1) {
    const Replay replay(stream, states);
    for (const CapturedNode& node : graph_->nodes) {
      replay.run(node);
    }
  } else {
    replay_branches(owner, stream, states);
  }
}

void Graph::replay_branches(Device& owner, c10::Stream stream, c10::ArrayRef<PhiloxGenerator::State> generators) {
  std::vector<StreamHandle> queues{stream_handle(stream)};
  std::vector<Replay> replays{{stream, generators}};
  for (size_t queue = 1; queue < branches_.queues; ++queue) {
    const c10::Stream branch = branch_stream(stream.device_index(), static_cast<int>(queue) - 1);
    queues.push_back(stream_handle(branch));
    replays.emplace_back(branch, generators);
  }
  try {
    owner.submit(EventRecord{events_.back()}, queues[0]);
    for (size_t i = 0; i < graph_->nodes.size(); ++i) {
      const Branches::Step& step = branches_.steps[i];
      if (step.waits_for_begin) {
        owner.submit(EventWait{events_.back()}, queues[step.queue]);
      }
      for (const size_t before : step.waits_for) {
        owner.submit(EventWait{events_[before]}, queues[step.queue]);
      }
      replays[step.queue].run(graph_->nodes[i]);
      if (step.is_waited_for) {
        owner.submit(EventRecord{events_[i]}, queues[step.queue]);
      }
    }
    for (const size_t node : branches_.joined) {
      owner.submit(EventWait{events_[node]}, queues[0]);
    }
  } catch (...) {
    join(owner, queues);
    throw;
  }
}

void Graph::reset() {
  TORCH_CHECK(capture_ == nullptr, "a graph cannot be reset while it is being captured");
  destroy_events();
  native_.reset();
  branches_ = {};
  graph_.reset();
  ready_ = false;
  give_up_memory();
}

c10::MempoolId_t Graph::pool() const {
  TORCH_CHECK(pool_.has_value(), "pool() needs a graph that has memory; capture the graph first");
  return *pool_;
}

void Graph::debug_dump(const std::string& path) const {
  TORCH_CHECK(debug_, "call enable_debug_mode() before debug_dump()");
  check_captured("debug_dump()");
  std::ofstream file(path);
  file << "digraph graph_of_bp_" << static_cast<int>(stream_->device_index()) << " {\n  node [shape=box];\n";
  for (size_t i = 0; i < graph_->nodes.size(); ++i) {
    const CapturedNode& node = graph_->nodes[i];
    const std::string work = describe(node.command.command());
    const size_t queue = branches_.queues == 1 ? 0 : branches_.steps[i].queue;
    const std::string text =
        c10::str(node.operator_name, "\\n", work, "\\nstream ", node.stream, ", at a replay queue ", queue);
    file << "  n" << i << " [label=" << quoted(text) << "];\n";
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
      graph_.has_value(), what, " needs a captured graph, but this one ",
      capture_ != nullptr ? "is being captured; call capture_end() first"
                          : "has not been captured; call capture_begin() first");
}

void Graph::give_up_memory() {
  if (pool_.has_value()) {
    device_allocator(stream_->device_index()).release_pool(*pool_);
    pool_.reset();
  }
}

} // namespace backplane
