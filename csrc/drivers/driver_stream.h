// Streams and events of a Python driver's device, and the order of their commands.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "devices/device.h"
#include "drivers/driver_object.h"
#include "drivers/kernel_build.h"

namespace backplane {

// Exists while a queue runs a host callback in this thread. The thread must not wait for that queue.
class InHostCallback {
 public:
  InHostCallback() noexcept;
  ~InHostCallback();
  InHostCallback(const InHostCallback&) = delete;
  InHostCallback& operator=(const InHostCallback&) = delete;

  static bool is_running() noexcept; // in the calling thread
};

struct DriverStream : std::enable_shared_from_this<DriverStream> {
  using Execute = std::function<void(const Command&, DriverStream&)>;

  // `execute` submits a command to the driver immediately.
  explicit DriverStream(Execute execute)
      : deferred([this, execute = std::move(execute)](const Command& command) { execute(command, *this); }) {}

  PyObject* object = nullptr; // the driver's object, with one reference to it
  void* native = nullptr; // the native handle; set with a native launcher, or by native_handle()
  std::atomic<bool> is_shared{false}; // the native handle was given out, so others can submit work to the queue
  DeferredCommands deferred;
  std::atomic<uint64_t> launches{0}; // native submissions, which the driver does not see
  std::atomic<uint64_t> noted{0}; // value of `launches` at the last launched_natively() call

  std::atomic<uint64_t> begun{0}; // commands whose submission has begun
  std::atomic<uint64_t> submitted{0}; // commands whose submission has ended
  std::atomic<uint64_t> executed{0}; // this many of the first commands are known to be complete

  bool is_known_idle() const {
    return !is_shared.load() && executed.load() == submitted.load();
  }
  void has_executed(uint64_t count) {
    uint64_t known = executed.load();
    while (known < count && !executed.compare_exchange_weak(known, count)) {
    }
  }

  std::mutex mark_lock;
  std::shared_ptr<void> mark; // the latest event of DriverStreams::wait_for_last_mark

  // Throws the exception of a deferred command.
  void throw_failure() {
    if (C10_UNLIKELY(deferred.any())) {
      deferred.rethrow();
    }
  }
};

// While a stream waits for a kernel build or a signal (kernel_build.h), later commands are deferred behind it.
// Calls that return a result first wait for all of them.
class DriverStreams {
 public:
  // `driver` must outlive this object. `execute` submits a command to the driver immediately.
  DriverStreams(DriverObject& driver, DriverStream::Execute execute) : driver_(driver), execute_(std::move(execute)) {}

  // Like the methods of Device.
  StreamHandle create_stream(int priority);
  void destroy_stream(StreamHandle handle) noexcept;
  bool query_stream(StreamHandle handle);
  void synchronize_stream(StreamHandle handle);
  uintptr_t native_handle(StreamHandle handle);
  StreamHandle adopt_stream(uintptr_t native);
  EventHandle create_event(bool timing);
  // Adds an event that is shared with other processes.
  EventHandle insert_event(std::unique_ptr<NativeEvent> event);
  // The native event of insert_event(); throws for other events.
  static NativeEvent& shared_event(EventHandle event);
  void destroy_event(EventHandle event) noexcept;
  bool query_event(EventHandle event);
  void synchronize_event(EventHandle event);
  double elapsed_ms(EventHandle start, EventHandle end);
  // Null if the launcher has no timer.
  std::unique_ptr<CommandTimer> time_commands(StreamHandle stream);

  // The stream of a handle. Throws if the handle is not a stream.
  DriverStream& known(StreamHandle handle) const;
  // Waits for the commands of all streams. An error of a stream is kept for its next synchronization.
  void finish_work();
  // Called after a build, or when a signal is set: submits the commands that waited for it.
  void issue_ready() noexcept;

  // Executes the command, or defers it behind earlier ones. `build`: the build that it waits for; can be null.
  void submit(const Command& command, DriverStream& stream, c10::intrusive_ptr<KernelBuild> build);
  // Execute the command immediately.
  void record_event(const EventRecord& command, DriverStream& stream);
  void wait_event(const EventWait& command, DriverStream& stream);
  // Makes a stream wait for an event of `peer`. Returns false if the launcher does not support it.
  bool wait_for_peer(DriverStreams& peer, EventHandle event, StreamHandle stream);
  // Defers later commands until the signal is set.
  void wait_for_signal(c10::intrusive_ptr<HostSignal> signal, StreamHandle stream);

  // Exists while a command is submitted. The constructor blocks while too many commands are pending (kMaxWaiting).
  class Submission {
   public:
    Submission(DriverStreams& streams, DriverStream& stream) : stream_(stream) {
      if (C10_UNLIKELY(stream.begun.fetch_add(1, std::memory_order_relaxed) % kBetweenMarks == kBetweenMarks - 1)) {
        streams.wait_for_last_mark(stream);
      }
    }
    ~Submission() {
      stream_.submitted.fetch_add(1);
    }
    Submission(const Submission&) = delete;
    Submission& operator=(const Submission&) = delete;

   private:
    DriverStream& stream_;
  };

  // Submits a command with a call of the Python driver.
  template <typename Function>
  void ask(DriverStream& stream, const Doing& doing, const Function& function) {
    const Submission submission(*this, stream);
    driver_.ask(doing, function);
  }

  // Submits a command natively, past the Python driver. `doing` describes it, for messages.
  template <typename Text, typename Function>
  void natively(DriverStream& stream, const Text& doing, const Function& function) {
    driver_.errors().check();
    const Submission submission(*this, stream);
    try {
      function();
      if (stream.launches.fetch_add(1, std::memory_order_relaxed) % kFlushEvery == 0) {
        driver_.launcher()->flush(stream.native);
      }
    } catch (const NativeError& error) {
      driver_.errors().convert(error, driver_.object(), doing());
    }
  }

 private:
  using StreamPointer = std::shared_ptr<DriverStream>;
  class Event;
  class Timer;

  static constexpr uint64_t kFlushEvery = 16; // native submissions: start the device before anything synchronizes
  static constexpr uint64_t kBetweenMarks = kMaxWaiting / 2; // so the queue is not empty when the last mark is reached

  // Calls the native API and converts its errors.
  template <typename Function>
  std::invoke_result_t<Function> ask_natively(const char* doing, const Function& function) {
    driver_.errors().check();
    try {
      return function();
    } catch (const NativeError& error) {
      driver_.errors().convert(error, driver_.object(), doing);
    }
  }

  StreamHandle add(const char* doing, const std::function<pybind11::object()>& make, bool is_shared);
  static Event& event_of(EventHandle event);
  StreamPointer shared(StreamHandle handle) const;
  std::vector<StreamPointer> all() const;
  void record(Event& event, DriverStream& stream);
  void synchronize(const Event& event, const char* doing);
  void wait_for_last_mark(DriverStream& stream);
  void synchronize(DriverStream& stream);
  void note_launches(DriverStream& stream);
  void issue_recording(EventHandle event);

  DriverObject& driver_;
  const DriverStream::Execute execute_;
  mutable std::shared_mutex lock_; // not held during calls of the driver
  std::unordered_map<void*, StreamPointer> streams_;
  std::atomic<uint64_t> removed_{0};
};

} // namespace backplane
