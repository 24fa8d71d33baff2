#include "devices/faulty_device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "devices/forwarding_device.h"

namespace backplane {
namespace {

// The configured faults and the call counts of all devices.
class Faults {
 public:
  // Counts a call and returns its fault, if any.
  std::optional<FaultKind> next_fault(const char* name) {
    double wait = 0;
    std::optional<FaultKind> found;
    {
      std::lock_guard<std::mutex> guard(lock_);
      counts_.calls[name] += 1;
      wait = milliseconds_;
      if (const auto scheduled = scheduled_.find(name);
          scheduled != scheduled_.end() && --scheduled->second.first == 0) {
        found = scheduled->second.second;
        scheduled_.erase(scheduled);
      } else if (std::find(random_calls_.begin(), random_calls_.end(), name) != random_calls_.end()) {
        if (std::uniform_real_distribution<>()(random_) < probability_) {
          found = FaultKind::Error;
        }
      }
      counts_.failed += found.has_value() ? 1 : 0;
    }
    if (wait > 0) {
      std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(wait));
    }
    return found;
  }

  void schedule(const std::string& name, uint64_t nth, FaultKind kind) {
    std::lock_guard<std::mutex> guard(lock_);
    scheduled_[name] = {nth, kind};
  }

  void set_probability(const std::vector<std::string>& names, double probability, uint64_t seed) {
    std::lock_guard<std::mutex> guard(lock_);
    random_calls_ = names;
    probability_ = probability;
    random_.seed(seed);
  }

  void slow(double milliseconds) {
    std::lock_guard<std::mutex> guard(lock_);
    milliseconds_ = milliseconds;
  }

  void clear() {
    std::lock_guard<std::mutex> guard(lock_);
    scheduled_.clear();
    random_calls_.clear();
    milliseconds_ = 0;
  }

  FaultCounts counts(bool reset) {
    std::lock_guard<std::mutex> guard(lock_);
    return reset ? std::exchange(counts_, {}) : counts_;
  }

 private:
  std::mutex lock_; // not held while the device is called
  std::map<std::string, std::pair<uint64_t, FaultKind>> scheduled_; // (nth call from now, fault)
  std::vector<std::string> random_calls_;
  double probability_ = 0;
  double milliseconds_ = 0;
  std::mt19937_64 random_;
  FaultCounts counts_;
};

Faults& faults() {
  static auto* instance = new Faults;
  return *instance;
}

std::atomic<bool> prepared{false};

bool allocates(const std::string& name) {
  return name == "allocate" || name == "map";
}

void check_name(const std::string& name) {
  const auto& names = fault_names();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    std::string all;
    for (const std::string& one : names) {
      all += (all.empty() ? "" : ", ") + one;
    }
    TORCH_CHECK_VALUE(false, "unknown device call ", name, ": the calls that can fail are ", all);
  }
}

class FaultyDevice final : public ForwardingDevice {
 public:
  explicit FaultyDevice(std::unique_ptr<Device> inner) : ForwardingDevice(inner->properties(), std::move(inner)) {}

  bool is_lost() const noexcept override {
    return lost_.load() || inner_->is_lost();
  }

  void check_not_lost() const override {
    if (lost_.load()) {
      throw_lost();
    }
    inner_->check_not_lost();
  }

  // --- memory
  void* allocate(size_t bytes) override {
    return meets("allocate") ? nullptr : inner_->allocate(bytes);
  }

  void free(void* address, size_t bytes) override {
    if (!lost_.load()) { // a lost device can still release memory
      meets("free");
    }
    inner_->free(address, bytes);
  }

  std::pair<size_t, size_t> memory_info() override {
    meets("memory_info");
    return inner_->memory_info();
  }

  void* reserve(size_t bytes) override {
    meets("reserve");
    return inner_->reserve(bytes);
  }

  void unreserve(void* address, size_t bytes) override {
    if (!lost_.load()) {
      meets("unreserve");
    }
    inner_->unreserve(address, bytes);
  }

  bool map(void* address, size_t bytes) override {
    return !meets("map") && inner_->map(address, bytes);
  }

  void unmap(void* address, size_t bytes) override {
    if (!lost_.load()) {
      meets("unmap");
    }
    inner_->unmap(address, bytes);
  }

  void* pin(void* memory, size_t bytes) override {
    meets("pin");
    return inner_->pin(memory, bytes);
  }

  // --- streams and events
  StreamHandle create_stream(int priority) override {
    meets("create_stream");
    return inner_->create_stream(priority);
  }

  bool query_stream(StreamHandle stream) override {
    meets("query_stream");
    return inner_->query_stream(stream);
  }

  void synchronize_stream(StreamHandle stream) override {
    meets("synchronize_stream");
    inner_->synchronize_stream(stream);
  }

  EventHandle create_event(bool timing) override {
    meets("create_event");
    return inner_->create_event(timing);
  }

  bool query_event(EventHandle event) override {
    meets("query_event");
    return inner_->query_event(event);
  }

  void synchronize_event(EventHandle event) override {
    meets("synchronize_event");
    inner_->synchronize_event(event);
  }

  double elapsed_ms(EventHandle start, EventHandle end) override {
    meets("elapsed_ms");
    return inner_->elapsed_ms(start, end);
  }

  // --- commands
  void submit(const Command& command, StreamHandle stream) override {
    meets(kNames[command.index()]);
    inner_->submit(command, stream);
  }

  bool copy_from_peer(void* destination, Device& peer, const void* source, size_t bytes, StreamHandle stream) override {
    meets("copy_from_peer");
    return ForwardingDevice::copy_from_peer(destination, peer, source, bytes, stream);
  }

  std::unique_ptr<NativeGraph> instantiate(c10::ArrayRef<GraphCommand>) override {
    return nullptr; // submit() checks each command for faults
  }

  // --- kernels
  KernelHandle compile(KernelSource source) override {
    meets("compile");
    return inner_->compile(std::move(source));
  }

  void sleep(double milliseconds, StreamHandle stream) override {
    meets("sleep");
    inner_->sleep(milliseconds, stream);
  }

 private:
  // By the command's index in the variant. These are the names of a Python driver's methods.
  static constexpr const char* kNames[] = {"launch",    "call_on_queue", "copy",      "fill",
                                           "call_host", "record_event",  "wait_event"};
  static_assert(std::size(kNames) == std::variant_size_v<Command>);

  // Throws if the call fails; returns true if it is out of memory.
  bool meets(const char* name) {
    check_not_lost();
    const auto fault = faults().next_fault(name);
    if (!fault.has_value() || *fault == FaultKind::OutOfMemory) {
      return fault.has_value();
    }
    if (*fault == FaultKind::Loss) {
      lost_ = true;
      throw_lost();
    }
    TORCH_CHECK(false, properties().name, ": injected fault in ", name);
  }

  [[noreturn]] void throw_lost() const {
    throw c10::AcceleratorError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, -1,
        c10::str(
            properties().name,
            ": injected device loss. The contents of its tensors are lost, and every use of the "
            "device raises this error. Restart the process to use it again; other devices keep working"));
  }

  std::atomic<bool> lost_{false};
};

} // namespace

void prepare_faults() {
  TORCH_CHECK(!is_discovered(), "faults.prepare() must be called before devices are discovered");
  prepared = true;
}

bool faults_are_prepared() {
  return prepared;
}

std::unique_ptr<Device> make_faulty(std::unique_ptr<Device> inner) {
  return std::make_unique<FaultyDevice>(std::move(inner));
}

const std::vector<std::string>& fault_names() {
  static const auto* names = new std::vector<std::string>{
      "allocate",
      "call_host",
      "call_on_queue",
      "compile",
      "copy",
      "copy_from_peer",
      "create_event",
      "create_stream",
      "elapsed_ms",
      "fill",
      "free",
      "launch",
      "map",
      "memory_info",
      "pin",
      "query_event",
      "query_stream",
      "record_event",
      "reserve",
      "sleep",
      "synchronize_event",
      "synchronize_stream",
      "unmap",
      "unreserve",
      "wait_event"};
  return *names;
}

void fail_call(const std::string& name, uint64_t nth, FaultKind kind) {
  check_name(name);
  TORCH_CHECK_VALUE(nth > 0, "nth must be at least 1, but got ", nth);
  TORCH_CHECK_VALUE(
      kind != FaultKind::OutOfMemory || allocates(name), name,
      " does not allocate memory; only allocate and map can run out of it");
  faults().schedule(name, nth, kind);
}

void fail_by_chance(const std::vector<std::string>& names, double probability, uint64_t seed) {
  for (const std::string& name : names) {
    check_name(name);
  }
  TORCH_CHECK_VALUE(probability >= 0 && probability <= 1, "probability must be between 0 and 1, but got ", probability);
  faults().set_probability(names, probability, seed);
}

void slow_calls(double milliseconds) {
  TORCH_CHECK_VALUE(milliseconds >= 0, "milliseconds must be at least 0, but got ", milliseconds);
  faults().slow(milliseconds);
}

void clear_faults() {
  faults().clear();
}

FaultCounts fault_counts(bool reset) {
  return faults().counts(reset);
}

} // namespace backplane
