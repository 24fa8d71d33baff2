#include "drivers/host/host_device.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "devices/command.h"
#include "devices/pages.h"

namespace backplane {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> asynchronous{false};
std::optional<uint64_t> delay_seed;

// Random delays of the commands of one queue.
class Delays {
 public:
  Delays() : random_(*delay_seed + next_queue_++) {}

  void wait() {
    if (random_() % 2 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
    }
  }

 private:
  static inline std::atomic<uint64_t> next_queue_{0};
  std::mt19937_64 random_;
};

// An event. Each recording is a version; a wait refers to the version that was current when it was issued.
struct HostEventState {
  std::mutex lock;
  std::condition_variable changed;
  uint64_t recorded = 0;
  uint64_t reached = 0;
  Clock::time_point time;

  void reach(uint64_t version) {
    std::lock_guard<std::mutex> guard(lock);
    if (version > reached) {
      reached = version;
      time = Clock::now();
    }
    changed.notify_all();
  }

  uint64_t next_version() {
    std::lock_guard<std::mutex> guard(lock);
    return ++recorded;
  }

  // Returns 0 if the latest recording is reached.
  uint64_t version_to_wait_for() {
    std::lock_guard<std::mutex> guard(lock);
    return reached >= recorded ? 0 : recorded;
  }

  void wait_for(uint64_t version) {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [&] { return reached >= version; });
  }

  Clock::time_point reached_at() {
    std::lock_guard<std::mutex> guard(lock); // another thread can record and reach it at this moment
    return time;
  }
};

using HostEvent = std::shared_ptr<HostEventState>;

// A command in a queue. Event commands refer to a version of their event, which is fixed at submission.
struct QueuedCommand {
  StoredCommand stored;
  HostEvent event{};
  uint64_t version = 0;
};

void execute(const Command& command) {
  std::visit(
      Overloaded{
          [](const Copy& copy) { std::memmove(copy.destination, copy.source, copy.bytes); },
          [](const Fill& fill) { std::memset(fill.address, fill.value, fill.bytes); },
          [](const HostCallback& callback) { callback.function->run(callback.memory.data(), callback.numbers.data()); },
          [](const auto&) { TORCH_INTERNAL_ASSERT(false, "host devices do not support this command"); }},
      command);
}

// An in-order queue of commands. If it is empty, the submitting thread executes a command immediately. Commands behind
// a slow one, and all commands of asynchronous host devices, execute in the queue's own thread, which starts on first
// use.
class HostQueue {
 public:
  HostQueue() {
    if (delay_seed.has_value()) {
      delays_.emplace();
    }
  }

  void run(const Command& command) {
    if (idle() && !host_devices_are_asynchronous()) {
      execute(command);
    } else {
      enqueue({StoredCommand(command)});
    }
  }

  void record(const EventRecord& command, const HostEvent& event, uint64_t version) {
    if (idle()) {
      event->reach(version);
    } else {
      enqueue({StoredCommand(command), event, version});
    }
  }

  void enqueue(QueuedCommand command) {
    wait_for_room();
    std::lock_guard<std::mutex> guard(lock_);
    if (!started_) {
      std::thread([this] { serve(); }).detach(); // lives as long as the process, like the queue
      started_ = true;
    }
    pending_.fetch_add(1, std::memory_order_acq_rel);
    commands_.push_back(std::move(command));
    changed_.notify_all();
  }

  bool idle() const {
    return pending_.load(std::memory_order_acquire) == 0;
  }

  bool query() {
    if (idle()) {
      return true;
    }
    std::lock_guard<std::mutex> guard(lock_); // serve() reaches an event and counts its record as done under this lock
    return idle();
  }

  // Waits for the commands submitted so far; other threads can continue to submit more.
  void drain() {
    if (idle()) {
      return;
    }
    const GilReleased released;
    std::unique_lock<std::mutex> guard(lock_);
    changed_.wait(guard, [this, so_far = done_ + pending_] { return done_ >= so_far; });
  }

 private:
  static thread_local bool is_server;

  // Does nothing in the thread of a queue, which could wait for itself.
  void wait_for_room() {
    if (is_server || pending_.load(std::memory_order_acquire) < kMaxWaiting) {
      return;
    }
    const GilReleased released;
    std::unique_lock<std::mutex> guard(lock_);
    changed_.wait(guard, [this] { return pending_.load(std::memory_order_acquire) < kMaxWaiting; });
  }

  void serve() {
    is_server = true;
    std::unique_lock<std::mutex> guard(lock_);
    while (true) {
      changed_.wait(guard, [this] { return !commands_.empty(); });
      QueuedCommand next = std::move(commands_.front());
      commands_.pop_front();
      if (std::holds_alternative<EventRecord>(next.stored.command())) {
        next.event->reach(next.version); // under the lock: see query()
      } else {
        guard.unlock();
        if (delays_.has_value()) {
          delays_->wait();
        }
        if (next.event != nullptr) {
          next.event->wait_for(next.version);
        } else {
          execute(next.stored.command());
        }
        {
          const QueuedCommand gone = std::move(next);
        } // without the lock: its destructor can take locks
        guard.lock();
      }
      ++done_;
      pending_.fetch_sub(1, std::memory_order_acq_rel);
      changed_.notify_all();
    }
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<QueuedCommand> commands_;
  std::atomic<int64_t> pending_{0};
  int64_t done_ = 0; // number of completed commands
  bool started_ = false;
  std::optional<Delays> delays_; // used by the queue's thread
};

thread_local bool HostQueue::is_server = false;

HostQueue& queue(StreamHandle stream) {
  return *static_cast<HostQueue*>(stream);
}

const HostEvent& state(EventHandle event) {
  return *static_cast<HostEvent*>(event);
}

class HostDevice final : public Device {
 public:
  HostDevice(DeviceProperties properties, size_t memory_limit) : Device(std::move(properties)), limit_(memory_limit) {}

  // --- memory
  void* allocate(size_t bytes) override {
    if (!take(bytes)) {
      return nullptr;
    }
    void* address = pages::reserve(bytes);
    if (address != nullptr && !pages::commit(address, bytes)) {
      pages::release(address, bytes);
      address = nullptr;
    }
    if (address == nullptr) {
      give_back(bytes);
    }
    return address;
  }

  // Pending commands can still use the memory. It is unmapped when all busy streams have executed their current
  // commands.
  void free(void* address, size_t bytes) override {
    const std::shared_ptr<void> last_use(address, [bytes](void* memory) { pages::release(memory, bytes); });
    for (HostQueue* busy : busy_queues()) {
      busy->enqueue(
          {StoredCommand(HostCallback{make_host_function("free", [last_use](char* const*, const uint64_t*) {})})});
    }
    give_back(bytes);
  }

  std::pair<size_t, size_t> memory_info() override {
    const size_t used = used_.load();
    return {limit_ - std::min(used, limit_), limit_};
  }

  bool can_reserve() const override {
    return true;
  }

  void* reserve(size_t bytes) override {
    void* address = pages::reserve(bytes);
    TORCH_CHECK(address != nullptr, "cannot reserve ", bytes, " bytes of address space");
    return address;
  }

  void unreserve(void* address, size_t bytes) override {
    pages::release(address, bytes);
  }

  bool map(void* address, size_t bytes) override {
    if (!take(bytes)) {
      return false;
    }
    if (!pages::commit(address, bytes)) {
      give_back(bytes);
      return false;
    }
    return true;
  }

  void unmap(void* address, size_t bytes) override {
    if (host_devices_are_asynchronous()) { // otherwise commands are rarely pending
      for (HostQueue* busy : busy_queues()) {
        busy->drain();
      }
    }
    pages::decommit(address, bytes);
    give_back(bytes);
  }

  // --- streams
  StreamHandle create_stream(int) override {
    auto* made = new HostQueue;
    std::lock_guard<std::mutex> guard(lock_);
    queues_.push_back(made);
    return made;
  }

  void destroy_stream(StreamHandle) noexcept override {} // the queue's thread can still be running, so queues are kept

  bool query_stream(StreamHandle stream) override {
    return queue(stream).query();
  }

  void synchronize_stream(StreamHandle stream) override {
    queue(stream).drain();
  }

  // --- events
  EventHandle create_event(bool) override {
    return new HostEvent(std::make_shared<HostEventState>());
  }

  void destroy_event(EventHandle event) noexcept override {
    delete static_cast<HostEvent*>(event); // waiting queues share the state
  }

  bool query_event(EventHandle event) override {
    return state(event)->version_to_wait_for() == 0;
  }

  void synchronize_event(EventHandle event) override {
    const HostEvent shared = state(event);
    shared->wait_for(shared->version_to_wait_for());
  }

  double elapsed_ms(EventHandle start, EventHandle end) override {
    return std::chrono::duration<double, std::milli>(state(end)->reached_at() - state(start)->reached_at()).count();
  }

  // --- commands
  void submit(const Command& command, StreamHandle stream) override {
    HostQueue& submitted_to = queue(stream);
    if (const auto* record = std::get_if<EventRecord>(&command)) {
      const HostEvent event = state(record->event);
      submitted_to.record(*record, event, event->next_version());
    } else if (const auto* wait = std::get_if<EventWait>(&command)) {
      const HostEvent event = state(wait->event);
      if (const uint64_t version = event->version_to_wait_for(); version != 0) {
        submitted_to.enqueue({StoredCommand(command), event, version});
      }
    } else if (
        const auto* callback = std::get_if<HostCallback>(&command);
        callback != nullptr && !callback->function->is_operator()) {
      submitted_to.enqueue({StoredCommand(command)});
    } else {
      TORCH_CHECK_NOT_IMPLEMENTED(
          !std::holds_alternative<KernelLaunch>(command), properties().driver, " devices run no kernels");
      TORCH_CHECK_NOT_IMPLEMENTED(
          !std::holds_alternative<LibraryCall>(command), properties().name,
          " has no native launcher, so it cannot run library functions, which need its native queue");
      submitted_to.run(command);
    }
  }

  bool copy_from_peer(void* destination, Device& peer, const void* source, size_t bytes, StreamHandle stream) override {
    if (!can_access_peer(peer)) {
      return false;
    }
    submit(Copy{destination, source, bytes, CopyKind::WithinDevice}, stream);
    return true;
  }

  bool can_access_peer(const Device& peer) const override {
    return peer.properties().host_accessible();
  }

  bool host_sees_memory() const override {
    return true;
  }

  bool defers_operators() const override {
    return host_devices_are_asynchronous();
  }

  void sleep(double milliseconds, StreamHandle stream) override {
    const auto duration = std::chrono::duration<double, std::milli>(milliseconds);
    const auto sleep = [duration](char* const*, const uint64_t*) { std::this_thread::sleep_for(duration); };
    submit(HostCallback{make_host_function("sleep", sleep)}, stream);
  }

 private:
  std::vector<HostQueue*> busy_queues() {
    std::lock_guard<std::mutex> guard(lock_);
    std::vector<HostQueue*> busy;
    for (HostQueue* one : queues_) {
      if (!one->idle()) {
        busy.push_back(one);
      }
    }
    return busy;
  }

  bool take(size_t bytes) {
    size_t used = used_.load();
    do {
      if (bytes > limit_ - std::min(used, limit_)) {
        return false;
      }
    } while (!used_.compare_exchange_weak(used, used + bytes));
    return true;
  }

  void give_back(size_t bytes) {
    used_.fetch_sub(bytes);
  }

  const size_t limit_;
  std::atomic<size_t> used_{0};
  std::mutex lock_;
  std::vector<HostQueue*> queues_; // all queues, including those of destroyed streams
};

} // namespace

void make_host_devices_asynchronous(std::optional<uint64_t> delays) {
  delay_seed = delays;
  asynchronous.store(true);
}

bool host_devices_are_asynchronous() noexcept {
  return asynchronous.load(std::memory_order_relaxed);
}

std::unique_ptr<Device> make_host_device(DeviceProperties properties, size_t memory_limit) {
  return std::make_unique<HostDevice>(std::move(properties), memory_limit);
}

} // namespace backplane
