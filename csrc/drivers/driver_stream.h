// Streams and events of a device that a Python driver brought, and the order of what they are given.
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

// Exists while a queue calls the host: the calling thread must not wait for that queue.
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

  // `execute` gives a command to the driver now.
  explicit DriverStream(Execute execute)
      : deferred([this, execute = std::move(execute)](const Command& command) { execute(command, *this); }) {}

  PyObject* object = nullptr; // what the driver calls it, with one reference to it
  void* native = nullptr; // what its hardware API does; with a native launcher, or once somebody asked for it
  std::atomic<bool> is_shared{false}; // others may have given the queue work
  DeferredCommands deferred;
  std::atomic<uint64_t> launches{0}; // native ones, which the driver does not see
  std::atomic<uint64_t> noted{0}; // how many of them it was told of

  std::atomic<uint64_t> begun{0}; // commands whose submission has begun,
  std::atomic<uint64_t> submitted{0}; // and ended
  std::atomic<uint64_t> executed{0}; // a value of `submitted` whose commands are known to have executed

  bool is_known_idle() const {
    return !is_shared.load() && executed.load() == submitted.load();
  }
  void has_executed(uint64_t count) {
    uint64_t known = executed.load();
    while (known < count && !executed.compare_exchange_weak(known, count)) {
    }
  }

  std::mutex mark_lock;
  std::shared_ptr<void> mark; // the latest of DriverStreams::wait_for_last_mark, an event

  // Throws the exception of a deferred command.
  void throw_failure() {
    if (C10_UNLIKELY(deferred.any())) {
      deferred.rethrow();
    }
  }
};

// While a stream has commands that wait for a kernel to be built (kernel_build.h), later commands wait behind them; calls that
// return something wait for all.
class DriverStreams {
 public:
  // `driver` lives as long as this. `execute` gives a command to the driver now.
  DriverStreams(DriverObject& driver, DriverStream::Execute execute) : driver_(driver), execute_(std::move(execute)) {}

  // As the methods of Device.
  StreamHandle create_stream(int priority);
  void destroy_stream(StreamHandle handle) noexcept;
  bool query_stream(StreamHandle handle);
  void synchronize_stream(StreamHandle handle);
  uintptr_t native_handle(StreamHandle handle);
  StreamHandle adopt_stream(uintptr_t native);
  EventHandle create_event(bool timing);
  // An event that is shared with other processes.
  EventHandle insert_event(std::unique_ptr<NativeEvent> event);
  // One of insert_event(); throws for others.
  static NativeEvent& shared_event(EventHandle event);
  void destroy_event(EventHandle event) noexcept;
  bool query_event(EventHandle event);
  void synchronize_event(EventHandle event);
  double elapsed_ms(EventHandle start, EventHandle end);
  // Null where the launcher has no timer.
  std::unique_ptr<CommandTimer> time_commands(StreamHandle stream);

  // The stream of a handle; throws where there is none.
  DriverStream& known(StreamHandle handle) const;
  // Waits for the work of all streams. What one fails with is left for those who wait for it.
  void finish_work();
  // A build is over: gives the driver what waited for it.
  void issue_ready() noexcept;

  // Executes the command, or stores it behind those that wait for a kernel. `build`: what the command itself waits for; may be
  // null.
  void submit(const Command& command, DriverStream& stream, c10::intrusive_ptr<KernelBuild> build);
  // Executes now.
  void record_event(const EventRecord& command, DriverStream& stream);
  void wait_event(const EventWait& command, DriverStream& stream);
  // The same for an event of `peer`'s; false where neither the launcher nor the driver in Python can.
  bool wait_for_peer(DriverStreams& peer, EventHandle event, StreamHandle stream);

  // Exists while a command is submitted to the queue, which has room for it then (kMostWaiting).
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

  // Calls the driver in Python to give it a command.
  template <typename Function>
  void ask(DriverStream& stream, const Doing& doing, const Function& function) {
    const Submission submission(*this, stream);
    driver_.ask(doing, function);
  }

  // Gives the queue a command that the driver in Python does not see; `doing` says what, for errors.
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

  static constexpr uint64_t kFlushEvery = 16; // native launches: the device should not idle because nobody synchronizes
  static constexpr uint64_t kBetweenMarks = kMostWaiting / 2; // the queue is not empty when the last mark is reached

  // As DriverObject::ask, of the hardware's API.
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
  mutable std::shared_mutex lock_; // never held while the driver is called
  std::unordered_map<void*, StreamPointer> streams_;
  std::atomic<uint64_t> removed_{0};
};

} // namespace backplane
