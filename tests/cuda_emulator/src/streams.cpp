// Streams, and their functions of the API.

#include "streams.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "capture.h"
#include "entry.h"

namespace {

thread_local bool runs_host_function = false;

void run_tasks(const std::shared_ptr<Stream>& stream, std::shared_ptr<Context> context) {
  for (;;) {
    Task task;
    {
      std::unique_lock lock(stream->mutex);
      stream->changed.wait(lock, [&] { return stream->ended || !stream->tasks.empty(); });
      if (stream->tasks.empty()) {
        return;
      }
      task = std::move(stream->tasks.front());
      stream->tasks.pop_front();
    }
    for (const auto& one : task.after) {
      one->wait();
    }
    if (context->error == CUDA_SUCCESS) {
      const CUresult error = task.operation->execute(*context);
      if (error != CUDA_SUCCESS) {
        context->fail(error);
      }
    }
    task.done->finish();
  }
}

bool synchronizes_with_legacy(const Stream& stream) {
  return (stream.flags & CU_STREAM_NON_BLOCKING) == 0 && !stream.is_legacy;
}

std::shared_ptr<Completion> last_of(Stream& stream) {
  std::lock_guard lock(stream.mutex);
  return stream.last;
}

void add_pending(Completions& all, std::shared_ptr<Completion> one) {
  if (one != nullptr && !one->is_done()) {
    all.push_back(std::move(one));
  }
}

// Calls the function with each stream of the context. The caller holds `order`.
template <class Function>
void for_each_stream(Context& context, Function function) {
  auto& streams = context.streams;
  streams.erase(std::remove_if(streams.begin(), streams.end(), [](auto& one) { return one.expired(); }), streams.end());
  for (const auto& weak : streams) {
    if (const auto one = weak.lock()) {
      function(*one);
    }
  }
}

// The default streams of a thread, by context. They end with the thread.
struct ThreadStreams {
  ~ThreadStreams() {
    for (const auto& [context, stream] : all) {
      end_stream(*stream);
    }
  }
  std::vector<std::pair<std::weak_ptr<Context>, std::shared_ptr<Stream>>> all;
};

std::shared_ptr<Stream> per_thread_stream(const std::shared_ptr<Context>& context) {
  thread_local ThreadStreams own;
  for (const auto& [of, stream] : own.all) {
    if (of.lock() == context) {
      return stream;
    }
  }
  own.all.emplace_back(context, make_stream(context, 0, 0));
  return own.all.back().second;
}

} // namespace

// --- completions -----------------------------------------------------------------------------------------------------

void Completion::finish() {
  std::lock_guard lock(mutex_);
  done_ = true;
  when_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

void Completion::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_; });
}

bool Completion::is_done() {
  std::lock_guard lock(mutex_);
  return done_;
}

std::chrono::steady_clock::time_point Completion::when() {
  std::lock_guard lock(mutex_);
  return when_;
}

// --- submission ------------------------------------------------------------------------------------------------------

std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context>& context, unsigned flags, int priority) {
  static std::atomic<unsigned long long> last{0};
  auto stream = std::make_shared<Stream>();
  stream->context = context;
  stream->flags = flags;
  stream->priority = std::clamp(priority, kGreatestPriority, kLeastPriority);
  stream->id = ++last;
  std::lock_guard lock(context->order);
  stream->is_legacy = context->legacy == nullptr;
  context->streams.push_back(stream);
  return stream;
}

void end_stream(const Stream& given) {
  auto& stream = const_cast<Stream&>(given);
  std::lock_guard lock(stream.mutex);
  stream.ended = true;
  stream.changed.notify_all();
}

std::shared_ptr<Stream> stream_of(const std::shared_ptr<Context>& context, CUstream handle) {
  const auto number = reinterpret_cast<uintptr_t>(handle);
  if (number <= 1) { // CU_STREAM_LEGACY is 1
    return context->legacy;
  }
  return number == 2 ? per_thread_stream(context) : find(handle); // CU_STREAM_PER_THREAD
}

std::shared_ptr<Completion> enqueue(
    const std::shared_ptr<Stream>& stream, const std::shared_ptr<Operation>& operation) {
  const auto context = stream->context.lock();
  auto done = std::make_shared<Completion>();
  if (context == nullptr || context->destroyed) {
    done->finish();
    return done;
  }
  std::lock_guard order(context->order);
  Task task{operation, operation->waits_for(), done};
  if (stream->is_legacy) {
    for_each_stream(*context, [&](Stream& one) {
      if (synchronizes_with_legacy(one)) {
        add_pending(task.after, last_of(one));
      }
    });
  } else if (synchronizes_with_legacy(*stream)) {
    add_pending(task.after, last_of(*context->legacy));
  }
  operation->submitted(done);
  std::lock_guard lock(stream->mutex);
  stream->last = done;
  stream->tasks.push_back(std::move(task));
  if (!stream->has_thread) {
    stream->has_thread = true;
    std::thread(run_tasks, stream, context).detach();
  }
  stream->changed.notify_one();
  return done;
}

CUresult submit(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Operation>& operation) {
  bool is_captured = false;
  RETURN_ERROR(capture_operation(stream, operation, &is_captured));
  if (!is_captured) {
    enqueue(stream, operation);
  }
  return CUDA_SUCCESS;
}

// What is not done of the work that a call for the stream waits for: for the legacy default stream, also that of all
// blocking streams.
Completions pending(Stream& stream) {
  Completions all;
  add_pending(all, last_of(stream));
  const auto context = stream.context.lock();
  if (stream.is_legacy && context != nullptr) {
    std::lock_guard lock(context->order);
    for_each_stream(*context, [&](Stream& one) {
      if (synchronizes_with_legacy(one)) {
        add_pending(all, last_of(one));
      }
    });
  }
  return all;
}

void wait_for(const std::shared_ptr<Stream>& stream) {
  for (const auto& one : pending(*stream)) {
    one->wait();
  }
}

void wait_for_all(Context& context) {
  Completions all;
  {
    std::lock_guard lock(context.order);
    for_each_stream(context, [&](Stream& one) { add_pending(all, last_of(one)); });
  }
  for (const auto& one : all) {
    one->wait();
  }
}

CUresult execute_now(const std::shared_ptr<Context>& context, const std::shared_ptr<Operation>& operation) {
  RETURN_ERROR(refuse_if_capturing(context->legacy));
  RETURN_ERROR(refuse_during_capture());
  enqueue(context->legacy, operation)->wait();
  return context->status();
}

bool in_host_function() {
  return runs_host_function;
}

void call_from_driver(CUhostFn function, void* argument) {
  const bool before = std::exchange(runs_host_function, true);
  function(argument);
  runs_host_function = before;
}

CUresult HostFunction::execute(Context&) {
  call_from_driver(parameters.fn, parameters.userData);
  return CUDA_SUCCESS;
}

// --- the API ---------------------------------------------------------------------------------------------------------

API cuStreamCreateWithPriority(CUstream* made, unsigned flags, int priority) {
  ENTER_CONTEXT();
  REQUIRE(made != nullptr && flags <= CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
  *made = Registry<Stream>::all().add(make_stream(context, flags, priority));
  return CUDA_SUCCESS;
}

API cuStreamCreate(CUstream* made, unsigned flags) {
  ENTER_CONTEXT();
  REQUIRE(made != nullptr && flags <= CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
  *made = Registry<Stream>::all().add(make_stream(context, flags, 0));
  return CUDA_SUCCESS;
}

API cuStreamDestroy_v2(CUstream handle) {
  ENTER_UNLESS_FAILED();
  const auto stream = Registry<Stream>::all().remove(handle);
  REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE);
  abandon_capture(stream);
  end_stream(*stream);
  return CUDA_SUCCESS;
}

// Declares `stream`, of the parameter `handle`.
#define ENTER_STREAM()                            \
  ENTER_CONTEXT();                                \
  const auto stream = stream_of(context, handle); \
  REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE)

API cuStreamGetPriority(CUstream handle, int* priority) {
  ENTER_STREAM();
  REQUIRE(priority != nullptr, CUDA_ERROR_INVALID_VALUE);
  *priority = stream->priority;
  return CUDA_SUCCESS;
}

API cuStreamGetFlags(CUstream handle, unsigned* flags) {
  ENTER_STREAM();
  REQUIRE(flags != nullptr, CUDA_ERROR_INVALID_VALUE);
  *flags = stream->flags;
  return CUDA_SUCCESS;
}

API cuStreamGetId(CUstream handle, unsigned long long* id) {
  ENTER_STREAM();
  REQUIRE(id != nullptr, CUDA_ERROR_INVALID_VALUE);
  *id = stream->id;
  return CUDA_SUCCESS;
}

API cuStreamGetCtx(CUstream handle, CUcontext* of) {
  ENTER_STREAM();
  REQUIRE(of != nullptr, CUDA_ERROR_INVALID_VALUE);
  *of = stream->context.lock().get();
  return CUDA_SUCCESS;
}

API cuStreamGetDevice(CUstream handle, CUdevice* number) {
  ENTER_STREAM();
  REQUIRE(number != nullptr, CUDA_ERROR_INVALID_VALUE);
  *number = number_of(stream->context.lock()->device);
  return CUDA_SUCCESS;
}

API cuStreamQuery(CUstream handle) {
  ENTER_STREAM();
  RETURN_ERROR(refuse_if_capturing(stream));
  const bool is_done = pending(*stream).empty();
  RETURN_ERROR(context->status());
  return is_done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API cuStreamSynchronize(CUstream handle) {
  ENTER_STREAM();
  RETURN_ERROR(refuse_if_capturing(stream));
  wait_for(stream);
  return stream->context.lock()->status();
}

API cuLaunchHostFunc(CUstream handle, CUhostFn function, void* argument) {
  ENTER_STREAM();
  REQUIRE(function != nullptr, CUDA_ERROR_INVALID_VALUE);
  return submit(stream, std::make_shared<HostFunction>(CUDA_HOST_NODE_PARAMS{function, argument}));
}

API cuLaunchHostFunc_v2(CUstream handle, CUhostFn function, void* argument, unsigned mode) {
  ENTER_STREAM();
  REQUIRE(function != nullptr && mode <= 1, CUDA_ERROR_INVALID_VALUE);
  return submit(stream, std::make_shared<HostFunction>(CUDA_HOST_NODE_PARAMS{function, argument}));
}
