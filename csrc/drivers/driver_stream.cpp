#include "drivers/driver_stream.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <mutex>

namespace py = pybind11;

namespace backplane {

namespace {

thread_local bool in_host_callback = false;

} // namespace

InHostCallback::InHostCallback() noexcept {
  in_host_callback = true;
}

InHostCallback::~InHostCallback() {
  in_host_callback = false;
}

bool InHostCallback::is_running() noexcept {
  return in_host_callback;
}

// An event and the number of its deferred recordings. Deferred recordings hold references, so that the user can destroy
// the event before they execute.
class DriverStreams::Event : public c10::intrusive_ptr_target {
 public:
  Event(const DriverObject& driver, py::object event) : driver_(driver), object_(event.release().ptr()) {}
  Event(const DriverObject& driver, std::unique_ptr<NativeEvent> event)
      : driver_(driver), native_(std::move(event)), object_(nullptr) {}

  ~Event() override {
    if (!Py_IsInitialized() || (native_ != nullptr && driver_.errors().is_lost())) {
      static_cast<void>(native_.release()); // the driver and its API must not be called any more
      return;
    }
    if (native_ != nullptr) {
      return;
    }
    DeviceCall gil(true);
    const py::error_scope kept;
    driver_.call_quietly("destroy_event", object_);
    Py_DECREF(object_);
  }

  // Null if the event is an object of the driver.
  NativeEvent* native() const {
    return native_.get();
  }
  // Whether other processes can wait for the event.
  bool is_shared = false;

  py::handle object() const {
    return object_;
  }

  // The stream of the latest deferred recording; null if there was none.
  StreamPointer stream() const {
    std::lock_guard<std::mutex> guard(lock_);
    return stream_;
  }

  bool is_deferred() const {
    return deferred_.load() > 0;
  }

  // Notes the position of the latest recording: it is command number `count` of the stream (0: unknown).
  void recorded_behind(DriverStream& stream, uint64_t count) {
    std::lock_guard<std::mutex> guard(lock_);
    position_ = {stream.shared_from_this(), count};
  }
  struct Position {
    StreamPointer stream;
    uint64_t count = 0;

    void has_executed() const {
      if (stream != nullptr) {
        stream->has_executed(count);
      }
    }
  };
  Position position() const {
    std::lock_guard<std::mutex> guard(lock_);
    return position_;
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
  const DriverObject& driver_;
  std::unique_ptr<NativeEvent> native_;
  PyObject* const object_; // the driver's object; null for a native event
  mutable std::mutex lock_;
  StreamPointer stream_;
  Position position_;
  std::atomic<int> deferred_{0}; // deferred recordings
};

DriverStreams::Event& DriverStreams::event_of(EventHandle event) {
  return *static_cast<Event*>(event);
}

// --- streams
StreamHandle DriverStreams::create_stream(int priority) {
  return add("creating a stream", [&] { return driver_.attr("create_stream")(priority); }, /*is_shared=*/false);
}

StreamHandle DriverStreams::adopt_stream(uintptr_t native) {
  for (const StreamPointer& stream : all()) {
    if (reinterpret_cast<uintptr_t>(stream->native) == native) {
      return stream.get();
    }
  }
  return add("adopting a stream", [&] { return driver_.attr("adopt_stream")(native); }, /*is_shared=*/true);
}

uintptr_t DriverStreams::native_handle(StreamHandle handle) {
  DriverStream& stream = known(handle);
  stream.deferred.issue_all(); // native work must execute after the commands submitted before
  stream.throw_failure();
  stream.is_shared = true;
  return driver_.ask("getting the native handle of a stream", [&] {
    if (stream.native == nullptr) {
      stream.native = as_pointer(driver_.attr("native_stream")(py::handle(stream.object)));
    }
    return reinterpret_cast<uintptr_t>(stream.native);
  });
}

// Adds the stream that `make` returns. `make` is called with the GIL.
StreamHandle DriverStreams::add(const char* doing, const std::function<py::object()>& make, bool is_shared) {
  const auto stream = std::make_shared<DriverStream>(execute_);
  stream->is_shared = is_shared;
  driver_.ask(doing, [&] {
    py::object object = make();
    try {
      if (driver_.launcher() != nullptr || is_shared) {
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

void DriverStreams::destroy_stream(StreamHandle handle) noexcept {
  if (!Py_IsInitialized()) {
    return;
  }
  DeviceCall gil(true);
  const py::error_scope kept;
  StreamPointer stream = shared(handle);
  stream->deferred.issue_all();
  stream->mark = nullptr;
  {
    std::unique_lock<std::shared_mutex> guard(lock_);
    streams_.erase(handle);
    ++removed_;
  }
  driver_.call_quietly("destroy_stream", stream->object);
  Py_DECREF(stream->object);
}

bool DriverStreams::query_stream(StreamHandle handle) {
  DriverStream& stream = known(handle);
  if (stream.deferred.any()) {
    stream.deferred.issue_ready();
    stream.deferred.rethrow();
    if (stream.deferred.is_waiting()) {
      return false;
    }
  }
  driver_.errors().check();
  if (stream.is_known_idle()) {
    return true;
  }
  return driver_.ask("querying a stream", [&] {
    note_launches(stream);
    return driver_.attr("query_stream")(py::handle(stream.object)).cast<bool>();
  });
}

void DriverStreams::synchronize_stream(StreamHandle handle) {
  DriverStream& stream = known(handle);
  stream.deferred.issue_all();
  synchronize(stream);
  stream.throw_failure();
}

// --- events
EventHandle DriverStreams::create_event(bool timing) {
  const NativeLauncher* launcher = driver_.launcher();
  if (launcher != nullptr && launcher->has_events()) {
    return ask_natively("creating an event", [&]() -> EventHandle {
      return c10::make_intrusive<Event>(driver_, launcher->create_event(timing)).release();
    });
  }
  return driver_.ask("creating an event", [&]() -> EventHandle {
    return c10::make_intrusive<Event>(driver_, driver_.attr("create_event")(timing)).release();
  });
}

EventHandle DriverStreams::insert_event(std::unique_ptr<NativeEvent> event) {
  auto made = c10::make_intrusive<Event>(driver_, std::move(event));
  made->is_shared = true;
  return made.release();
}

NativeEvent& DriverStreams::shared_event(EventHandle event) {
  TORCH_CHECK(
      event_of(event).is_shared,
      "this event cannot be shared with other processes: it was first recorded by another method than "
      "torch.bp.Event.record() or torch.bp.Stream.record_event()");
  return *event_of(event).native();
}

void DriverStreams::destroy_event(EventHandle event) noexcept {
  c10::intrusive_ptr<Event>::reclaim(&event_of(event));
}

void DriverStreams::submit(const Command& command, DriverStream& stream, c10::intrusive_ptr<KernelBuild> build) {
  if (const auto* wait = std::get_if<EventWait>(&command)) {
    issue_recording(wait->event);
    stream.deferred.issue_all(); // a deferred wait could see a later recording of the event
  }
  const auto* recording = std::get_if<EventRecord>(&command);
  if (recording != nullptr && event_of(recording->event).is_shared) {
    stream.deferred.issue_all(); // other processes cannot see deferred recordings
  }
  stream.throw_failure();
  if (build == nullptr && !stream.deferred.any()) {
    execute_(command, stream);
    return;
  }
  std::shared_ptr<const void> keep;
  if (recording != nullptr) { // the event can be destroyed before the recording executes
    Event& event = event_of(recording->event);
    event.defer(shared(&stream));
    keep = std::shared_ptr<Event>(c10::intrusive_ptr<Event>::reclaim_copy(&event).release(), [](Event* kept) {
      kept->recorded();
      c10::intrusive_ptr<Event>::reclaim(kept);
    });
  } else if (const auto* wait = std::get_if<EventWait>(&command)) {
    // Deferred behind a command that another thread has submitted meanwhile, or in a callback of a deferred command.
    keep = std::shared_ptr<Event>(
        c10::intrusive_ptr<Event>::reclaim_copy(&event_of(wait->event)).release(),
        [](Event* kept) { c10::intrusive_ptr<Event>::reclaim(kept); });
  }
  stream.deferred.submit(std::move(build), StoredCommand(command, std::move(keep)));
}

void DriverStreams::record_event(const EventRecord& command, DriverStream& stream) {
  record(event_of(command.event), stream);
}

void DriverStreams::wait_event(const EventWait& command, DriverStream& stream) {
  constexpr const char* kDoing = "making a stream wait for an event";
  const Event& event = event_of(command.event);
  if (NativeEvent* native = event.native()) {
    natively(stream, Doing{kDoing}, [&] { native->wait(stream.native); });
  } else {
    ask(stream, {kDoing}, [&] { driver_.attr("wait_event")(event.object(), py::handle(stream.object)); });
  }
}

bool DriverStreams::wait_for_peer(DriverStreams& peer, EventHandle handle, StreamHandle stream_handle) {
  constexpr const char* kDoing = "making a stream wait for an event of another device";
  const Event& event = event_of(handle);
  NativeEvent* native = event.native();
  const NativeLauncher* launcher = peer.driver_.launcher(); // the event's, which makes the call
  if (native != nullptr && !(launcher != nullptr && launcher->waits_for_peers())) {
    return false;
  }
  DriverStream& stream = known(stream_handle);
  peer.issue_recording(handle);
  stream.deferred.issue_all();
  stream.throw_failure();
  if (native != nullptr) {
    natively(stream, Doing{kDoing}, [&] { native->wait_on_peer(stream.native); });
  } else {
    ask(stream, {kDoing}, [&] { driver_.attr("wait_event")(event.object(), py::handle(stream.object)); });
  }
  return true;
}

void DriverStreams::wait_for_signal(c10::intrusive_ptr<HostSignal> signal, StreamHandle handle) {
  DriverStream& stream = known(handle);
  stream.throw_failure();
  stream.deferred.submit(signal, std::nullopt);
  signal->when_set([this] { issue_ready(); });
}

bool DriverStreams::query_event(EventHandle event) {
  driver_.errors().check();
  if (event_of(event).is_deferred()) {
    event_of(event).stream()->deferred.issue_ready();
    if (event_of(event).is_deferred()) {
      return false;
    }
  }
  constexpr const char* kDoing = "querying an event";
  if (NativeEvent* native = event_of(event).native()) {
    const auto position = event_of(event).position();
    const bool reached = ask_natively(kDoing, [&] { return native->query(); });
    if (reached) {
      position.has_executed();
    }
    return reached;
  }
  return driver_.ask(kDoing, [&] { return driver_.attr("query_event")(event_of(event).object()).cast<bool>(); });
}

void DriverStreams::synchronize_event(EventHandle event) {
  issue_recording(event);
  synchronize(event_of(event), "waiting for an event");
  if (const StreamPointer stream = event_of(event).stream()) {
    stream->throw_failure();
  }
}

double DriverStreams::elapsed_ms(EventHandle start, EventHandle end) {
  issue_recording(start);
  issue_recording(end);
  constexpr const char* kDoing = "measuring the time between events";
  if (NativeEvent* native = event_of(end).native()) {
    return ask_natively(kDoing, [&] { return native->elapsed_ms(*event_of(start).native()); });
  }
  return driver_.ask(kDoing, [&] {
    return driver_.attr("elapsed_ms")(event_of(start).object(), event_of(end).object()).cast<double>();
  });
}

class DriverStreams::Timer final : public CommandTimer {
 public:
  Timer(DriverStreams& streams, std::unique_ptr<NativeTimer> native) : streams_(streams), native_(std::move(native)) {}

  void stop() override {
    native_->stop();
  }

  std::optional<std::pair<double, double>> since(EventHandle base) override {
    return streams_.ask_natively(
        "measuring the time of a command", [&] { return native_->since(*event_of(base).native()); });
  }

 private:
  DriverStreams& streams_;
  const std::unique_ptr<NativeTimer> native_;
};

std::unique_ptr<CommandTimer> DriverStreams::time_commands(StreamHandle handle) {
  DriverStream& stream = known(handle);
  stream.deferred.issue_all();
  stream.throw_failure();
  auto native = driver_.launcher() == nullptr ? nullptr : driver_.launcher()->time_commands();
  return native == nullptr ? nullptr : std::make_unique<Timer>(*this, std::move(native));
}

// --- order of commands
// Each thread caches its last valid handle.
DriverStream& DriverStreams::known(StreamHandle handle) const {
  struct Last {
    const DriverStreams* streams;
    StreamHandle handle;
    uint64_t removed;
  };
  thread_local Last last{};
  const Last now{this, handle, removed_.load(std::memory_order_acquire)};
  if (C10_UNLIKELY(last.handle != handle || last.streams != this || last.removed != now.removed)) {
    std::shared_lock<std::shared_mutex> guard(lock_);
    TORCH_CHECK(
        streams_.count(handle) != 0, handle, " is not a stream of ", driver_.name(),
        ": create streams of a Python driver with torch.bp.Stream");
    last = now;
  }
  return *static_cast<DriverStream*>(handle);
}

void DriverStreams::finish_work() {
  for (const StreamPointer& stream : all()) {
    stream->deferred.issue_all();
    try {
      synchronize(*stream);
    } catch (...) {
      stream->deferred.keep_failure(std::current_exception());
    }
  }
}

void DriverStreams::issue_ready() noexcept {
  for (const StreamPointer& stream : all()) {
    stream->deferred.issue_ready();
  }
}

DriverStreams::StreamPointer DriverStreams::shared(StreamHandle handle) const {
  std::shared_lock<std::shared_mutex> guard(lock_);
  return streams_.at(handle);
}

std::vector<DriverStreams::StreamPointer> DriverStreams::all() const {
  std::shared_lock<std::shared_mutex> guard(lock_);
  std::vector<StreamPointer> found;
  for (const auto& [handle, stream] : streams_) {
    found.push_back(stream);
  }
  return found;
}

// Executes the recording immediately.
void DriverStreams::record(Event& event, DriverStream& stream) {
  constexpr const char* kDoing = "recording an event";
  NativeEvent* native = event.native();
  if (native == nullptr) {
    ask(stream, {kDoing}, [&] { driver_.attr("record_event")(event.object(), py::handle(stream.object)); });
    return;
  }
  const uint64_t count = stream.submitted.load();
  natively(stream, Doing{kDoing}, [&] { native->record(stream.native); });
  // If other threads have submitted commands meanwhile, the position of the recording is unknown.
  event.recorded_behind(stream, stream.submitted.load() == count + 1 ? count + 1 : 0);
}

void DriverStreams::synchronize(const Event& event, const char* doing) {
  if (NativeEvent* native = event.native()) {
    const auto position = event.position();
    ask_natively(doing, [&] { native->synchronize(); });
    position.has_executed();
  } else {
    driver_.ask(doing, [&] { driver_.attr("synchronize_event")(event.object()); });
  }
}

// Records a new mark at the end of the queue and waits for the previous one.
void DriverStreams::wait_for_last_mark(DriverStream& stream) {
  if (InHostCallback::is_running()) { // the queue only continues when this thread returns
    return;
  }
  std::shared_ptr<void> mark(create_event(/*timing=*/false), [this](EventHandle event) { destroy_event(event); });
  record(event_of(mark.get()), stream);
  {
    const std::lock_guard<std::mutex> guard(stream.mark_lock);
    std::swap(stream.mark, mark);
  }
  if (mark != nullptr) {
    synchronize(event_of(mark.get()), "waiting for space in a queue");
  }
}

// Waits for the commands that were submitted to the driver; not for deferred ones.
void DriverStreams::synchronize(DriverStream& stream) {
  driver_.errors().check();
  const uint64_t count = stream.submitted.load();
  if (stream.is_known_idle()) {
    return; // nothing was submitted since
  }
  driver_.ask("waiting for a stream", [&] {
    note_launches(stream);
    driver_.attr("synchronize_stream")(py::handle(stream.object));
  });
  stream.has_executed(count);
}

// Calls the driver's launched_natively() if there are native submissions that it has not been told about.
void DriverStreams::note_launches(DriverStream& stream) {
  const uint64_t launches = stream.launches.load();
  if (stream.is_shared.load() || (driver_.launcher() != nullptr && stream.noted.load() != launches)) {
    driver_.attr("launched_natively")(py::handle(stream.object));
    stream.noted.store(launches); // after the call, so that it is repeated if it fails
  }
}

// Submits the latest recording of the event to the driver, if it is deferred.
void DriverStreams::issue_recording(EventHandle event) {
  if (event_of(event).is_deferred()) {
    event_of(event).stream()->deferred.issue_while([&] { return event_of(event).is_deferred(); });
  }
}

} // namespace backplane
