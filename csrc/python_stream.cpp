#include "python_stream.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <mutex>

namespace py = pybind11;

namespace backplane {

// An event, and its recordings that are still deferred. Kept by those, so that it may be destroyed before.
class PythonStreams::Event : public c10::intrusive_ptr_target {
 public:
  Event(const DriverDevice& driver, py::object event) : driver_(driver), object_(event.release().ptr()) {}

  ~Event() override {
    if (!Py_IsInitialized()) {
      return;
    }
    DeviceCall gil(true);
    const py::error_scope kept;
    driver_.call_quietly("destroy_event", object_);
    Py_DECREF(object_);
  }

  py::handle object() const {
    return object_;
  }

  // The stream of the latest recording that was deferred; null if there has been none.
  StreamPointer stream() const {
    std::lock_guard<std::mutex> guard(lock_);
    return stream_;
  }

  bool is_deferred() const {
    return deferred_.load() > 0;
  }

  void defer(StreamPointer stream) {
    std::lock_guard<std::mutex> guard(lock_);
    stream_ = std::move(stream);
    ++deferred_;
  }

  void recorded() {
    --deferred_;
  }

 private:
  const DriverDevice& driver_;
  PyObject* const object_; // what the driver calls it
  mutable std::mutex lock_;
  StreamPointer stream_;
  std::atomic<int> deferred_{0}; // recordings
};

PythonStreams::Event& PythonStreams::event_of(EventHandle event) {
  return *static_cast<Event*>(event);
}

// --- streams
StreamHandle PythonStreams::create_stream(int priority) {
  auto stream = std::make_shared<PythonStream>();
  driver_.ask("making a stream", [&] {
    py::object object = driver_.attr("create_stream")(priority);
    try {
      if (driver_.launcher() != nullptr) {
        stream->native = as_pointer(driver_.attr("native_stream")(object));
      }
    } catch (const std::exception&) {
      const py::error_scope kept;
      driver_.call_quietly("destroy_stream", object);
      throw;
    }
    stream->object = object.release().ptr();
  });
  std::unique_lock<std::shared_mutex> guard(lock_);
  return streams_.emplace(stream.get(), stream).first->first;
}

void PythonStreams::destroy_stream(StreamHandle handle) noexcept {
  if (!Py_IsInitialized()) {
    return;
  }
  DeviceCall gil(true);
  const py::error_scope kept;
  StreamPointer stream = shared(handle);
  stream->deferred.issue_all();
  {
    std::unique_lock<std::shared_mutex> guard(lock_);
    streams_.erase(handle);
    ++removed_;
  }
  driver_.call_quietly("destroy_stream", stream->object);
  Py_DECREF(stream->object);
}

bool PythonStreams::query_stream(StreamHandle handle) {
  PythonStream& stream = known(handle);
  if (stream.deferred.any()) {
    stream.deferred.issue_ready();
    stream.deferred.rethrow();
    if (stream.deferred.is_waiting()) {
      return false;
    }
  }
  return driver_.ask("asked whether a stream is done", [&] {
    note_launches(stream);
    return driver_.attr("query_stream")(py::handle(stream.object)).cast<bool>();
  });
}

void PythonStreams::synchronize_stream(StreamHandle handle) {
  PythonStream& stream = known(handle);
  stream.deferred.issue_all();
  synchronize(stream);
  stream.throw_failure();
}

// --- events
EventHandle PythonStreams::create_event(bool timing) {
  return driver_.ask("making an event", [&]() -> EventHandle {
    return c10::make_intrusive<Event>(driver_, driver_.attr("create_event")(timing)).release();
  });
}

void PythonStreams::destroy_event(EventHandle event) noexcept {
  c10::intrusive_ptr<Event>::reclaim(&event_of(event));
}

void PythonStreams::record_event(EventHandle handle, StreamHandle stream_handle) {
  PythonStream& stream = known(stream_handle);
  Event& event = event_of(handle);
  const auto record = [this, &stream](Event& recorded) {
    driver_.ask(
        "recording an event", [&] { driver_.attr("record_event")(recorded.object(), py::handle(stream.object)); });
  };
  if (!stream.deferred.any()) {
    record(event);
    return;
  }
  event.defer(shared(stream_handle));
  stream.deferred.submit(nullptr, [record, kept = c10::intrusive_ptr<Event>::reclaim_copy(&event)] {
    const auto done = c10::make_scope_exit([&] { kept->recorded(); });
    record(*kept);
  });
}

void PythonStreams::wait_event(EventHandle event, StreamHandle handle) {
  PythonStream& stream = known(handle);
  issue_recording(event);
  stream.deferred.issue_all(); // the event may be recorded again, and this means the recording of now
  stream.throw_failure();
  driver_.ask("making a stream wait for an event", [&] {
    driver_.attr("wait_event")(event_of(event).object(), py::handle(stream.object));
  });
}

bool PythonStreams::query_event(EventHandle event) {
  driver_.errors().check();
  if (event_of(event).is_deferred()) {
    event_of(event).stream()->deferred.issue_ready();
    if (event_of(event).is_deferred()) {
      return false;
    }
  }
  return driver_.ask("asked for an event", [&] {
    return driver_.attr("query_event")(event_of(event).object()).cast<bool>();
  });
}

void PythonStreams::synchronize_event(EventHandle event) {
  issue_recording(event);
  driver_.ask("waiting for an event", [&] { driver_.attr("synchronize_event")(event_of(event).object()); });
  if (const StreamPointer stream = event_of(event).stream()) {
    stream->throw_failure();
  }
}

double PythonStreams::elapsed_ms(EventHandle start, EventHandle end) {
  issue_recording(start);
  issue_recording(end);
  return driver_.ask("asked for the time between events", [&] {
    return driver_.attr("elapsed_ms")(event_of(start).object(), event_of(end).object()).cast<double>();
  });
}

// --- their order
// Each thread remembers the last good handle.
PythonStream& PythonStreams::known(StreamHandle handle) const {
  struct Last {
    const PythonStreams* streams;
    StreamHandle handle;
    uint64_t removed;
  };
  thread_local Last last{};
  const Last now{this, handle, removed_.load(std::memory_order_acquire)};
  if (C10_UNLIKELY(last.handle != handle || last.streams != this || last.removed != now.removed)) {
    std::shared_lock<std::shared_mutex> guard(lock_);
    TORCH_CHECK(
        streams_.count(handle) != 0, handle, " is not a stream of ", driver_.name(),
        ": streams of a Python driver are made by torch.bp.Stream only");
    last = now;
  }
  return *static_cast<PythonStream*>(handle);
}

void PythonStreams::finish_work() {
  for (const StreamPointer& stream : all()) {
    stream->deferred.submit(nullptr, [this, stream] { synchronize(*stream); });
    stream->deferred.issue_all();
  }
}

void PythonStreams::issue_ready() noexcept {
  for (const StreamPointer& stream : all()) {
    stream->deferred.issue_ready();
  }
}

PythonStreams::StreamPointer PythonStreams::shared(StreamHandle handle) const {
  std::shared_lock<std::shared_mutex> guard(lock_);
  return streams_.at(handle);
}

std::vector<PythonStreams::StreamPointer> PythonStreams::all() const {
  std::shared_lock<std::shared_mutex> guard(lock_);
  std::vector<StreamPointer> found;
  for (const auto& [handle, stream] : streams_) {
    found.push_back(stream);
  }
  return found;
}

// Waits for what the driver was given.
void PythonStreams::synchronize(PythonStream& stream) {
  driver_.ask("waiting for a stream", [&] {
    note_launches(stream);
    driver_.attr("synchronize_stream")(py::handle(stream.object));
  });
}

// Tells the driver, which counts what is under way, of launches that went past it.
void PythonStreams::note_launches(PythonStream& stream) {
  const uint64_t launches = stream.launches.load();
  if (driver_.launcher() != nullptr && stream.noted.load() != launches) {
    driver_.attr("launched_natively")(py::handle(stream.object));
    stream.noted.store(launches); // only now: should it fail, the driver still has to be told
  }
}

// Makes sure that the driver has got the event's latest recording.
void PythonStreams::issue_recording(EventHandle event) {
  if (event_of(event).is_deferred()) {
    event_of(event).stream()->deferred.issue_all();
  }
}

} // namespace backplane
