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
#include "drivers/host_calls.h"
#include "drivers/kernel_build.h"
#include "drivers/progress.h"

namespace backplane {

struct DriverStream : std::enable_shared_from_this<DriverStream> {
  PyObject* object; // what the driver calls it, with one reference to it
  void* native = nullptr; // what its hardware API does; only with a native launcher
  DeferredCommands deferred;
  std::atomic<uint64_t> launches{0}; // native ones, which the driver does not see
  std::atomic<uint64_t> noted{0}; // how many of them it was told of

  // Whether it is known, without asking the driver, that it has done all that it was given.
  bool is_idle() {
    if (deferred.any()) {
      return false;
    }
    if (!progress.is_idle()) {
      const std::lock_guard<std::mutex> guard(end_lock);
      if (end && end_number == progress.last() && end()) {
        progress.reached(end_number);
        end = nullptr;
      }
    }
    return progress.is_idle();
  }
  // An event was recorded, as command `number`.
  void ends_with(std::function<bool()> recording, uint64_t number) {
    const std::lock_guard<std::mutex> guard(end_lock);
    end = std::move(recording);
    end_number = number;
  }
  Progress progress;
  std::atomic<uint64_t> synchronized{0}; // up to which command the driver has waited without an error
  std::mutex end_lock;
  std::function<bool()> end; // NativeEvent::latest_recording
  uint64_t end_number = 0; // not 0 where there is one

  std::atomic<uint64_t> given{0}; // commands, and host functions; one that begins a command counts as two
  std::mutex mark_lock;
  std::shared_ptr<void> mark; // the latest of DriverStreams::wait_for_room, an event

  std::mutex calls_lock;
  std::shared_ptr<HostCalls> calls; // the last that the queue was given, as command `calls_number`
  uint64_t calls_number = 0;

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

  // Called before something is given to the queue: see kMostWaiting.
  void wait_for_room(DriverStream& stream) {
    if (C10_UNLIKELY(stream.given.fetch_add(1, std::memory_order_relaxed) % kBetweenMarks == kBetweenMarks - 1)) {
      wait_for_last_mark(stream);
    }
  }
  // Exists while a command is given to the queue, for which there is room then.
  Progress::Giving giving(DriverStream& stream) {
    wait_for_room(stream);
    return Progress::Giving(stream.progress);
  }

  // Calls the driver now, or when the commands in front have been given to it.
  template <typename Command>
  void in_order(DriverStream& stream, const Doing& doing, Command command) {
    if (stream.deferred.any()) {
      stream.throw_failure();
      stream.deferred.submit(nullptr, [this, &stream, doing, command] {
        const auto given = giving(stream);
        driver_.ask(doing, command);
      });
      return;
    }
    const auto given = giving(stream);
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

  // Gives the queue something that the driver does not see; `doing` says what, for errors. The command may take its number.
  template <typename Text, typename Command>
  void natively(DriverStream& stream, const Text& doing, const Command& command) {
    driver_.errors().check();
    const auto given = giving(stream);
    try {
      if constexpr (std::is_invocable_v<const Command&, uint64_t>) {
        command(given.number());
      } else {
        command();
      }
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
