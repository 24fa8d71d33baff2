// Stream capture.

#include "capture.h"

#include <algorithm>
#include <set>

#include "entry.h"
#include "graph.h"

namespace {

constexpr int kGlobal = 0, kThreadLocal = 1, kRelaxed = 2; // modes
constexpr int kNone = 0, kActive = 1, kInvalidated = 2; // states

std::mutex mutex; // protects all captures, and Stream::capture
std::vector<std::shared_ptr<Capture>>& active() {
  static auto& all = *new std::vector<std::shared_ptr<Capture>>;
  return all;
}
thread_local int thread_mode = kGlobal;

bool is_ended(const std::shared_ptr<Capture>& capture) {
  return std::count(active().begin(), active().end(), capture) == 0;
}

// The capture of a blocking stream of the context; null if there is none.
Capture* blocking_capture(const Context* context) {
  for (const auto& one : active()) {
    for (const auto& [stream, tails] : one->tails) {
      if (stream->context.lock().get() == context && (stream->flags & CU_STREAM_NON_BLOCKING) == 0) {
        return one.get();
      }
    }
  }
  return nullptr;
}

// Work on the legacy default stream would depend on captured work.
CUresult refuse_on_legacy(const Stream& stream) {
  if (stream.is_legacy) {
    if (Capture* other = blocking_capture(stream.context.lock().get())) {
      other->is_invalid = true;
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
  }
  return CUDA_SUCCESS;
}

void end(const std::shared_ptr<Capture>& capture) {
  for (const auto& [stream, tails] : capture->tails) {
    stream->capture = nullptr;
  }
  active().erase(std::remove(active().begin(), active().end(), capture), active().end());
}

// Whether the work of all streams precedes the end of the stream in which the capture began.
bool is_joined(const Capture& capture, const std::shared_ptr<Stream>& origin) {
  std::set<const Node*> before;
  std::vector<const Node*> next(capture.tails.at(origin).begin(), capture.tails.at(origin).end());
  while (!next.empty()) {
    const Node* node = next.back();
    next.pop_back();
    if (before.insert(node).second) {
      next.insert(next.end(), node->dependencies.begin(), node->dependencies.end());
    }
  }
  for (const auto& [stream, tails] : capture.tails) {
    for (const Node* tail : tails) {
      if (before.count(tail) == 0) {
        return false;
      }
    }
  }
  return true;
}

// Begins the capture to a new graph, or to the one of `into`.
CUresult begin(const std::shared_ptr<Stream>& stream, int mode, const Capture& into) {
  REQUIRE(mode >= kGlobal && mode <= kRelaxed, CUDA_ERROR_INVALID_VALUE);
  std::lock_guard lock(mutex);
  REQUIRE(!stream->is_legacy, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  REQUIRE(stream->capture == nullptr, CUDA_ERROR_ILLEGAL_STATE);
  static unsigned long long last = 0;
  auto capture = std::make_shared<Capture>(into);
  if (!capture->is_into_graph) {
    capture->graph = std::make_shared<Graph>();
    Registry<Graph>::all().add(capture->graph); // nodes can be added to it during the capture
  }
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->id = ++last;
  capture->tails[stream]; // none
  stream->capture = capture;
  active().push_back(capture);
  return CUDA_SUCCESS;
}

void add(std::vector<Node*>& tails, const std::vector<Node*>& more) {
  for (Node* one : more) {
    if (std::count(tails.begin(), tails.end(), one) == 0) {
      tails.push_back(one);
    }
  }
}

} // namespace

CUresult capture_operation(
    const std::shared_ptr<Stream>& stream, const std::shared_ptr<Operation>& operation, bool* is_captured) {
  std::lock_guard lock(mutex);
  if (stream->capture == nullptr) {
    return refuse_on_legacy(*stream);
  }
  REQUIRE(!stream->capture->is_invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  std::vector<Node*>& tails = stream->capture->tails[stream];
  tails = {add_node(stream->capture->graph, operation, tails)};
  *is_captured = true;
  return CUDA_SUCCESS;
}

CUresult record(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream, bool external) {
  {
    std::lock_guard lock(mutex);
    if (stream->capture != nullptr && !external) {
      REQUIRE(!stream->capture->is_invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
      std::lock_guard own(event->mutex);
      event->capture = stream->capture;
      event->captured = stream->capture->tails[stream];
      return CUDA_SUCCESS;
    }
    REQUIRE(stream->capture != nullptr || !external, CUDA_ERROR_INVALID_VALUE);
  }
  return submit(stream, std::make_shared<EventRecord>(event));
}

CUresult wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Event>& event, bool external) {
  {
    std::lock_guard lock(mutex);
    std::lock_guard own(event->mutex);
    if (event->capture != nullptr && !external) {
      REQUIRE(!is_ended(event->capture), CUDA_ERROR_CAPTURED_EVENT);
      REQUIRE(!event->capture->is_invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
      REQUIRE(!stream->is_legacy, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
      if (stream->capture == nullptr) { // the stream joins the capture
        stream->capture = event->capture;
        event->capture->tails[stream] = {};
      }
      if (stream->capture != event->capture) {
        stream->capture->is_invalid = event->capture->is_invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
      }
      add(stream->capture->tails[stream], event->captured);
      return CUDA_SUCCESS;
    }
    REQUIRE(stream->capture != nullptr || !external, CUDA_ERROR_INVALID_VALUE);
    if (stream->capture != nullptr && !external) {
      REQUIRE(!stream->capture->is_invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
      stream->capture->is_invalid = true;
      return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
  }
  return submit(stream, std::make_shared<EventWait>(event));
}

void abandon_capture(const std::shared_ptr<Stream>& stream) {
  std::lock_guard lock(mutex);
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture != nullptr && capture->origin.lock() == stream) {
    end(capture);
    if (!capture->is_into_graph) {
      Registry<Graph>::all().remove(capture->graph.get());
    }
  }
}

CUresult refuse_if_capturing(const std::shared_ptr<Stream>& stream) {
  std::lock_guard lock(mutex);
  RETURN_ERROR(refuse_on_legacy(*stream));
  if (stream->capture != nullptr) {
    stream->capture->is_invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return CUDA_SUCCESS;
}

CUresult refuse_during_capture() {
  std::lock_guard lock(mutex);
  const auto self = std::this_thread::get_id();
  for (const auto& one : active()) {
    const bool is_own = one->thread == self && one->mode != kRelaxed;
    const bool is_other = one->mode == kGlobal && thread_mode == kGlobal;
    if (thread_mode != kRelaxed && (is_own || is_other)) {
      one->is_invalid = true;
      return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
  }
  return CUDA_SUCCESS;
}

// --- the API ---------------------------------------------------------------------------------------------------------

// Declares `stream`, of the parameter `handle`.
#define ENTER_STREAM()                            \
  ENTER_CONTEXT();                                \
  const auto stream = stream_of(context, handle); \
  REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE)

API cuStreamBeginCapture_v2(CUstream handle, int mode) {
  ENTER_STREAM();
  return begin(stream, mode, {});
}

API cuStreamBeginCaptureToGraph(
    CUstream handle, CUgraph to, const CUgraphNode* dependencies, const CUgraphEdgeData*, size_t count, int mode) {
  ENTER_STREAM();
  const auto graph = find(to);
  REQUIRE(graph != nullptr && (count == 0 || dependencies != nullptr), CUDA_ERROR_INVALID_VALUE);
  Capture into;
  into.graph = graph;
  into.is_into_graph = true;
  into.tails[stream] = {dependencies, dependencies + count};
  return begin(stream, mode, into);
}

API cuStreamEndCapture(CUstream handle, CUgraph* made) {
  ENTER_STREAM();
  REQUIRE(made != nullptr, CUDA_ERROR_INVALID_VALUE);
  *made = nullptr;
  std::lock_guard lock(mutex);
  const std::shared_ptr<Capture> capture = stream->capture;
  REQUIRE(capture != nullptr, CUDA_ERROR_ILLEGAL_STATE);
  const bool is_thread = capture->mode == kRelaxed || capture->thread == std::this_thread::get_id();
  REQUIRE(is_thread, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  if (capture->origin.lock() != stream) {
    capture->is_invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  }
  end(capture);
  if (!capture->is_invalid && is_joined(*capture, stream)) {
    *made = capture->graph.get();
    return CUDA_SUCCESS;
  }
  if (!capture->is_into_graph) {
    Registry<Graph>::all().remove(capture->graph.get());
  }
  return capture->is_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
}

namespace {

int status_of(const Stream& stream) {
  return stream.capture == nullptr ? kNone : stream.capture->is_invalid ? kInvalidated : kActive;
}

struct CaptureInfo {
  unsigned long long* id;
  CUgraph* graph;
  const CUgraphNode** dependencies;
  size_t* count;
};

CUresult give(const std::shared_ptr<Stream>& stream, int* status, const CaptureInfo& to) {
  REQUIRE(status != nullptr, CUDA_ERROR_INVALID_VALUE);
  std::lock_guard lock(mutex);
  RETURN_ERROR(refuse_on_legacy(*stream));
  *status = status_of(*stream);
  if (*status != kActive) {
    return CUDA_SUCCESS;
  }
  const std::vector<Node*>& tails = stream->capture->tails[stream];
  if (to.id != nullptr) {
    *to.id = stream->capture->id;
  }
  if (to.graph != nullptr) {
    *to.graph = stream->capture->graph.get();
  }
  if (to.dependencies != nullptr) {
    *to.dependencies = tails.data();
  }
  if (to.count != nullptr) {
    *to.count = tails.size();
  }
  return CUDA_SUCCESS;
}

} // namespace

API cuStreamIsCapturing(CUstream handle, int* status) {
  ENTER_STREAM();
  REQUIRE(status != nullptr, CUDA_ERROR_INVALID_VALUE);
  std::lock_guard lock(mutex);
  REQUIRE(!stream->is_legacy || blocking_capture(context.get()) == nullptr, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  *status = status_of(*stream);
  return CUDA_SUCCESS;
}

API cuStreamGetCaptureInfo_v2(
    CUstream handle,
    int* status,
    unsigned long long* id,
    CUgraph* graph,
    const CUgraphNode** dependencies,
    size_t* count) {
  ENTER_STREAM();
  return give(stream, status, {id, graph, dependencies, count});
}

API cuStreamGetCaptureInfo_v3(
    CUstream handle,
    int* status,
    unsigned long long* id,
    CUgraph* graph,
    const CUgraphNode** dependencies,
    const CUgraphEdgeData** edges,
    size_t* count) {
  ENTER_STREAM();
  size_t number = 0;
  RETURN_ERROR(give(stream, status, {id, graph, dependencies, &number}));
  if (count != nullptr) {
    *count = number;
  }
  if (edges != nullptr) { // like the nodes, valid until the thread's next call
    thread_local std::vector<CUgraphEdgeData> data;
    data.assign(number, {});
    *edges = data.data();
  }
  return CUDA_SUCCESS;
}

API cuStreamUpdateCaptureDependencies_v2(
    CUstream handle, CUgraphNode* dependencies, const CUgraphEdgeData*, size_t count, unsigned flags) {
  ENTER_STREAM();
  REQUIRE(flags <= 1 && (count == 0 || dependencies != nullptr), CUDA_ERROR_INVALID_VALUE);
  std::lock_guard lock(mutex);
  REQUIRE(status_of(*stream) == kActive, CUDA_ERROR_ILLEGAL_STATE);
  std::vector<Node*>& tails = stream->capture->tails[stream];
  if (flags == 1) {
    tails.clear();
  }
  add(tails, {dependencies, dependencies + count});
  return CUDA_SUCCESS;
}

API cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER();
  REQUIRE(mode != nullptr && *mode >= kGlobal && *mode <= kRelaxed, CUDA_ERROR_INVALID_VALUE);
  std::swap(*mode, thread_mode);
  return CUDA_SUCCESS;
}
