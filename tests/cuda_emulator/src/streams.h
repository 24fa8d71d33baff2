// Streams: queues of operations, each with a thread that executes them.

#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "contexts.h"
#include "cuda_api.h"

constexpr int kLeastPriority = 0, kGreatestPriority = -5;

// Whether an operation has been executed, and when.
class Completion {
 public:
  void finish();
  void wait();
  bool is_done();
  std::chrono::steady_clock::time_point when(); // of a finished one

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::chrono::steady_clock::time_point when_;
};

using Completions = std::vector<std::shared_ptr<Completion>>;

// Work for a stream or a node of a graph.
struct Operation {
  virtual ~Operation() = default;
  // Executes it, in the thread of a stream. An error becomes the sticky error of the context.
  virtual CUresult execute(Context& context) = 0;
  // Called in the submitting thread, in the order of the stream, with what becomes done after the execution.
  virtual void submitted(const std::shared_ptr<Completion>&) {}
  // What must be done before the execution, besides earlier work of the stream.
  virtual Completions waits_for() {
    return {};
  }
  // The number in CUgraphNodeType.
  virtual int node_type() const = 0;
  virtual std::shared_ptr<Operation> clone() const = 0;
};

struct Capture;

struct Task {
  std::shared_ptr<Operation> operation;
  Completions after;
  std::shared_ptr<Completion> done;
};

struct Stream {
  std::weak_ptr<Context> context;
  unsigned flags = 0;
  int priority = 0;
  unsigned long long id = 0;
  bool is_legacy = false;

  std::mutex mutex; // protects the following
  std::condition_variable changed;
  std::deque<Task> tasks;
  bool ended = false, has_thread = false;
  std::shared_ptr<Completion> last; // of the operation submitted last

  std::shared_ptr<Capture> capture; // protected by the mutex of captures
};

std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context>& context, unsigned flags, int priority);
// The thread of the stream ends when its work is done.
void end_stream(const Stream& stream);

// Returns the stream of a handle, or of one of the numbers for the default streams; null for an invalid handle.
std::shared_ptr<Stream> stream_of(const std::shared_ptr<Context>& context, CUstream handle);

// Submits an operation to a stream, or adds it to the graph that the stream is captured to.
CUresult submit(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Operation>& operation);
// The same for a stream that is not captured.
std::shared_ptr<Completion> enqueue(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Operation>& operation);

// Waits for the work submitted so far.
void wait_for(const std::shared_ptr<Stream>& stream);
void wait_for_all(Context& context);

// Submits an operation to the legacy default stream, and waits for it.
CUresult execute_now(const std::shared_ptr<Context>& context, const std::shared_ptr<Operation>& operation);

// Returns an error if a capture forbids calls that synchronize, and invalidates that capture.
CUresult refuse_during_capture();

bool in_host_function();
// Calls a function of the program, which must not call CUDA.
void call_from_driver(CUhostFn function, void* argument);

struct HostFunction : Operation {
  explicit HostFunction(const CUDA_HOST_NODE_PARAMS& given) : parameters(given) {}
  CUresult execute(Context& context) override;
  int node_type() const override {
    return 3;
  }
  std::shared_ptr<Operation> clone() const override {
    return std::make_shared<HostFunction>(*this);
  }

  CUDA_HOST_NODE_PARAMS parameters;
};

// --- events ----------------------------------------------------------------------------------------------------------

struct SharedEvent; // in memory of several processes

struct Event {
  std::weak_ptr<Context> context;
  unsigned flags = 0;
  std::shared_ptr<SharedEvent> shared; // of an interprocess event

  std::mutex mutex; // protects the following
  std::shared_ptr<Completion> last; // of the latest recording
  std::shared_ptr<Capture> capture; // recorded in it
  std::vector<CUgraphNode> captured;
};
