// Streams and events of a device that a Python driver brought, and the order of what they are given.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "devices/device.h"
#include "drivers/driver_object.h"
#include "drivers/kernel_build.h"

namespace backplane {

// Exists while a queue calls the host: the calling thread must not wait for that queue.
class HostCallback {
 public:
  HostCallback() noexcept;
  ~HostCallback();
  HostCallback(const HostCallback&) = delete;
  HostCallback& operator=(const HostCallback&) = delete;

  static bool is_running() noexcept; // in the calling thread
};

struct DriverStream {
  PyObject* object; // what the driver calls it, with one reference to it
  void* native = nullptr; // what its hardware API does; only with a native launcher
  DeferredCommands deferred;
  std::atomic<uint64_t> launches{0}; // native ones, which the driver does not see
  std::atomic<uint64_t> noted{0}; // how many of them it was told of

  // Whether an event that was recorded last is reached.
  bool is_past_last_event() {
    const std::lock_guard<std::mutex> guard(last_event_lock);
    return last_event && begun.load() == last_event_number && submitted.load() == last_event_number && last_event();
  }
  std::mutex last_event_lock;
  std::function<bool()> last_event; // NativeEvent::latest_recording
  uint64_t last_event_number = 0; // how many commands there were with it

  std::atomic<uint64_t> begun{0}; // commands whose submission has begun,
  std::atomic<uint64_t> submitted{0}; // and ended
  std::atomic<uint64_t> synchronized{0}; // `submitted` before the latest wait of the driver's that raised no error

  std::mutex mark_lock;
  std::shared_ptr<void> mark; // the latest of DriverStreams::wait_for_room, an event

  // Throws what a deferred command has failed with.
  void throw_failure() {
    if (C10_UNLIKELY(deferred.any())) {
      deferred.rethrow();
    }
  }
};

// While a stream has commands that wait for a kernel to be built (kernel_build.h), what comes after is deferred too, if
// it returns nothing; the other calls wait.
class DriverStreams {
 public:
  // `driver` lives as long as this.
  explicit DriverStreams(DriverObject& driver) : driver_(driver) {}

  // As the methods of Device.
  StreamHandle create_stream(int priority);
  void destroy_stream(StreamHandle handle) noexcept;
  bool query_stream(StreamHandle handle);
  void synchronize_stream(StreamHandle handle);
  EventHandle create_event(bool timing);
  void destroy_event(EventHandle event) noexcept;
  void record_event(EventHandle event, StreamHandle stream);
  void wait_event(EventHandle event, StreamHandle stream);
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

  // Calls the driver now, or when the commands in front have been given to it.
  template <typename Command>
  void in_order(DriverStream& stream, const Doing& doing, Command command) {
    if (stream.deferred.any()) {
      stream.throw_failure();
      stream.deferred.submit(nullptr, [this, &stream, doing, command] {
        const Submission submission(*this, stream);
        driver_.ask(doing, command);
      });
      return;
    }
    const Submission submission(*this, stream);
    driver_.ask(doing, command);
  }

  // As in_order, for commands that go past the driver.
  template <typename Command>
  void natively_in_order(DriverStream& stream, const Doing& doing, Command command) {
    const auto go = [this, &stream, doing, command = std::move(command)] { natively(stream, doing, command); };
    if (C10_LIKELY(!stream.deferred.any())) {
      go();
      return;
    }
    stream.throw_failure();
    stream.deferred.submit(nullptr, go);
  }

  // Gives the queue something that the driver does not see; `doing` says what, for errors.
  template <typename Text, typename Command>
  void natively(DriverStream& stream, const Text& doing, const Command& command) {
    driver_.errors().check();
    const Submission submission(*this, stream);
    try {
      command();
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
  mutable std::shared_mutex lock_; // never held while the driver is called
  std::unordered_map<void*, StreamPointer> streams_;
  std::atomic<uint64_t> removed_{0};
};

} // namespace backplane
