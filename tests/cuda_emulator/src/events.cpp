// Events.

#include <thread>

#include "capture.h"
#include "entry.h"
#include "interprocess.h"
#include "streams.h"

namespace {

constexpr unsigned kEventFlags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;

bool is_reached(Event& event) {
  std::shared_ptr<Completion> last;
  {
    std::lock_guard lock(event.mutex);
    last = event.last;
  }
  if (event.shared != nullptr) {
    return event.shared->done >= event.shared->recorded;
  }
  return last == nullptr || last->is_done();
}

bool was_captured(Event& event) {
  std::lock_guard lock(event.mutex);
  return event.capture != nullptr;
}

} // namespace

CUresult EventRecord::execute(Context&) {
  if (event->shared != nullptr) {
    event->shared->finish(ticket);
  }
  return CUDA_SUCCESS;
}

void EventRecord::submitted(const std::shared_ptr<Completion>& done) {
  if (event->shared != nullptr) {
    ticket = ++event->shared->recorded;
  }
  std::lock_guard lock(event->mutex);
  event->last = done;
  event->capture = nullptr;
}

CUresult EventWait::execute(Context&) {
  while (event->shared != nullptr && event->shared->done < ticket) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return CUDA_SUCCESS;
}

Completions EventWait::waits_for() {
  if (event->shared != nullptr) {
    ticket = event->shared->recorded;
    return {};
  }
  std::lock_guard lock(event->mutex);
  return event->last == nullptr ? Completions{} : Completions{event->last};
}

API cuEventCreate(CUevent* made, unsigned flags) {
  ENTER_CONTEXT();
  REQUIRE(made != nullptr && (flags & ~kEventFlags) == 0, CUDA_ERROR_INVALID_VALUE);
  const bool is_shared = (flags & CU_EVENT_INTERPROCESS) != 0;
  REQUIRE(!is_shared || (flags & CU_EVENT_DISABLE_TIMING) != 0, CUDA_ERROR_INVALID_VALUE);
  auto event = std::make_shared<Event>();
  event->context = context;
  event->flags = flags;
  if (is_shared) {
    event->shared = make_shared_event();
    REQUIRE(event->shared != nullptr, CUDA_ERROR_OPERATING_SYSTEM);
  }
  *made = Registry<Event>::all().add(event);
  return CUDA_SUCCESS;
}

API cuEventDestroy_v2(CUevent handle) {
  ENTER_UNLESS_FAILED();
  return Registry<Event>::all().remove(handle) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

API cuEventRecordWithFlags(CUevent handle, CUstream on, unsigned flags) {
  ENTER_CONTEXT();
  const auto event = find(handle);
  const auto stream = stream_of(context, on);
  REQUIRE(event != nullptr && stream != nullptr, CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(flags <= 1, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(event->context.lock() == stream->context.lock(), CUDA_ERROR_INVALID_HANDLE);
  return record(event, stream, flags == 1);
}

API cuEventRecord(CUevent handle, CUstream on) {
  ENTER_CONTEXT();
  const auto event = find(handle);
  const auto stream = stream_of(context, on);
  REQUIRE(event != nullptr && stream != nullptr, CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(event->context.lock() == stream->context.lock(), CUDA_ERROR_INVALID_HANDLE);
  return record(event, stream, false);
}

API cuStreamWaitEvent(CUstream on, CUevent handle, unsigned flags) {
  ENTER_CONTEXT();
  const auto event = find(handle);
  const auto stream = stream_of(context, on);
  REQUIRE(event != nullptr && stream != nullptr, CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(flags <= 1, CUDA_ERROR_INVALID_VALUE);
  return wait(stream, event, flags == 1);
}

API cuEventQuery(CUevent handle) {
  ENTER_UNLESS_FAILED();
  const auto event = find(handle);
  REQUIRE(event != nullptr, CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(!was_captured(*event), CUDA_ERROR_CAPTURED_EVENT);
  RETURN_ERROR(refuse_during_capture());
  const bool reached = is_reached(*event);
  RETURN_ERROR(event->context.lock()->status());
  return reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API cuEventSynchronize(CUevent handle) {
  ENTER_UNLESS_FAILED();
  const auto event = find(handle);
  REQUIRE(event != nullptr, CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(!was_captured(*event), CUDA_ERROR_CAPTURED_EVENT);
  RETURN_ERROR(refuse_during_capture());
  EventWait now{event};
  for (const auto& one : now.waits_for()) {
    one->wait();
  }
  const auto context = event->context.lock();
  now.execute(*context);
  return context->status();
}

API cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  ENTER_UNLESS_FAILED();
  const auto from = find(start), to = find(end);
  REQUIRE(from != nullptr && to != nullptr, CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(milliseconds != nullptr, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(((from->flags | to->flags) & CU_EVENT_DISABLE_TIMING) == 0, CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(!was_captured(*from) && !was_captured(*to), CUDA_ERROR_CAPTURED_EVENT);
  REQUIRE(from->last != nullptr && to->last != nullptr, CUDA_ERROR_INVALID_HANDLE);
  RETURN_ERROR(from->context.lock()->status());
  REQUIRE(is_reached(*from) && is_reached(*to), CUDA_ERROR_NOT_READY);
  *milliseconds = std::chrono::duration<float, std::milli>(to->last->when() - from->last->when()).count();
  return CUDA_SUCCESS;
}

API cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}
