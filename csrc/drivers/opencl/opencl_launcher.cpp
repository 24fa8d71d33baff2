#include "drivers/opencl/opencl_launcher.h"

#include <Python.h>

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <c10/util/StringUtil.h>
#include <c10/util/llvmMathExtras.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "devices/device.h"

namespace backplane {
namespace {

// The functions of OpenCL that are used here; cl_mem, cl_kernel, cl_command_queue and cl_event are pointers.
using Status = int32_t; // cl_int
using SetKernelArg = Status (*)(void* kernel, uint32_t index, size_t bytes, const void* value);
using EnqueueNDRangeKernel = Status (*)(
    void* queue,
    void* kernel,
    uint32_t dimensions,
    const size_t* offset,
    const size_t* items,
    const size_t* group,
    uint32_t waits,
    void* const* wait_list,
    void** event);
using EnqueueCopyBuffer = Status (*)(
    void* queue,
    void* source,
    void* destination,
    size_t source_offset,
    size_t destination_offset,
    size_t bytes,
    uint32_t waits,
    void* const* wait_list,
    void** event);
using EnqueueFillBuffer = Status (*)(
    void* queue,
    void* buffer,
    const void* pattern,
    size_t pattern_bytes,
    size_t offset,
    size_t bytes,
    uint32_t waits,
    void* const* wait_list,
    void** event);
using EnqueueNativeKernel = Status (*)(
    void* queue,
    void (*function)(void* arguments),
    void* arguments,
    size_t bytes,
    uint32_t buffers,
    void* const* buffer_list,
    const void** where_in_arguments,
    uint32_t waits,
    void* const* wait_list,
    void** event);
using Flush = Status (*)(void* queue);
using Finish = Status (*)(void* queue);

using EnqueueReadBuffer = Status (*)(
    void* queue,
    void* buffer,
    uint32_t blocking,
    size_t offset,
    size_t bytes,
    void* memory,
    uint32_t waits,
    void* const* wait_list,
    void** event);
using EnqueueWriteBuffer = Status (*)(
    void* queue,
    void* buffer,
    uint32_t blocking,
    size_t offset,
    size_t bytes,
    const void* memory,
    uint32_t waits,
    void* const* wait_list,
    void** event);
using EnqueueWithWaitList = Status (*)(void* queue, uint32_t waits, void* const* wait_list, void** event);
using WaitForEvents = Status (*)(uint32_t count, void* const* events);
using EventInfo = Status (*)(void* event, uint32_t name, size_t bytes, void* value, size_t* needed);
using ReleaseEvent = Status (*)(void* event);

constexpr uint32_t kExecutionStatus = 0x11D3; // CL_EVENT_COMMAND_EXECUTION_STATUS
constexpr Status kComplete = 0;
constexpr uint32_t kCommandStart = 0x1282; // CL_PROFILING_COMMAND_START
constexpr uint32_t kCommandEnd = 0x1283; // CL_PROFILING_COMMAND_END

struct OpenCLFunctions {
  SetKernelArg set_kernel_arg;
  EnqueueNDRangeKernel enqueue;
  EnqueueCopyBuffer copy;
  EnqueueFillBuffer fill;
  Flush flush;
  Finish finish = nullptr; // only if wider launches must wait: see Widths
  EnqueueNativeKernel enqueue_native = nullptr; // only if the device executes native kernels (processors)
  // Optional; each group is present or missing as a whole.
  EnqueueReadBuffer read = nullptr;
  EnqueueWriteBuffer write = nullptr;
  EnqueueWithWaitList marker = nullptr;
  EnqueueWithWaitList barrier = nullptr;
  WaitForEvents wait = nullptr;
  EventInfo info = nullptr;
  EventInfo profiling_info = nullptr;
  ReleaseEvent release = nullptr;
};

// Marks kernels that check bounds, so that excess work items do nothing (torch_backplane/kernels/dialects/base.py).
constexpr const char* kBounded = "// bounded\n";

// A mutex whose owner can wait for the device and then for the GIL. So lock() releases the GIL while it waits.
class DeviceMutex {
 public:
  void lock() {
    if (!mutex_.try_lock()) {
      const GilReleased released;
      mutex_.lock();
    }
  }
  void unlock() {
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
};

// Tracks the widths of the launches of a kernel text, as a workaround for PoCL 3.1. PoCL keeps a binary for each group
// size and for the widest launch so far, in one table for all devices. If it compiles the binary for a wider launch
// while a narrower launch of the same kernel is running, it corrupts its reference counts and aborts the process
// (pocl_release_dlhandle_cache in lib/CL/devices/common.c). So a launch that is wider than all earlier ones waits for
// those. If the kernel checks bounds, the launch is padded to a power of two groups, so that growing sizes rarely wait.
class Widths {
 public:
  // The widths of a text. They are never destroyed: a later kernel of the same text shares PoCL's binaries.
  static Widths& of(const std::string& text) {
    static auto& all = *new std::unordered_map<size_t, std::unique_ptr<Widths>>;
    static auto& lock = *new std::mutex;
    const std::lock_guard<std::mutex> guard(lock);
    std::unique_ptr<Widths>& one = all[std::hash<std::string>{}(text)]; // a hash collision only causes more waits
    if (one == nullptr) {
      one = std::make_unique<Widths>();
    }
    return *one;
  }

  // Held during each launch of the text.
  DeviceMutex mutex;

  // Waits if necessary and returns the size to launch with. Throws NativeError.
  LaunchSpec issue(void* queue, Finish finish, LaunchSpec size, bool bounded) {
    size_t& widest = widest_[size.group_size];
    if (width(size) > widest) {
      finish_all(queue);
      if (bounded && width(size) <= kMaxPadded) {
        for (size_t i = 0; i < size.global_size.size(); ++i) {
          size.global_size[i] = c10::llvm::PowerOf2Ceil(size.global_size[i] / size.group_size[i]) * size.group_size[i];
        }
      }
      widest = width(size);
    }
    const std::pair<void*, Finish> known(queue, finish);
    if (std::find(queues_.begin(), queues_.end(), known) == queues_.end()) {
      queues_.push_back(known); // streams of a pool are never destroyed
    }
    return size;
  }

 private:
  // Wider launches take milliseconds, which hides the wait. The limit also keeps padded sizes from overflowing.
  static constexpr size_t kMaxPadded = size_t{1} << 22;

  static size_t width(const LaunchSpec& size) {
    return *std::max_element(size.global_size.begin(), size.global_size.end());
  }

  // Only throws for the launch's own queue: errors of other queues are reported to their users.
  void finish_all(void* own) {
    const GilReleased released; // the pending work can need the GIL
    for (const auto& [queue, finish] : queues_) {
      if (const Status status = finish(queue); C10_UNLIKELY(status != 0 && queue == own)) {
        throw NativeError{"clFinish", status, ""};
      }
    }
  }

  std::map<std::array<size_t, 3>, size_t> widest_; // work items of the widest launch, by group size
  std::vector<std::pair<void*, Finish>> queues_; // queues with launches of the text
};

void check(const char* call, Status status) {
  if (C10_UNLIKELY(status != 0)) {
    throw NativeError{call, status, ""};
  }
}

// A profiling timestamp of a completed command, in nanoseconds.
uint64_t moment(const OpenCLFunctions& functions, void* event, uint32_t which) {
  uint64_t nanoseconds = 0;
  check("clGetEventProfilingInfo", functions.profiling_info(event, which, sizeof nanoseconds, &nanoseconds, nullptr));
  return nanoseconds;
}

// Collects the events of commands. OpenCL measures each command that has an event.
class OpenCLTimer final : public NativeTimer {
 public:
  explicit OpenCLTimer(const OpenCLFunctions& functions)
      : functions_(functions), outer_(std::exchange(current_, this)) {}

  ~OpenCLTimer() override {
    stop();
    for (void* event : events_) {
      static_cast<void>(functions_.release(event));
    }
  }

  // The `event` argument for the next command of this thread; null if no timer is active.
  static void** event() {
    return C10_LIKELY(current_ == nullptr) ? nullptr : &current_->events_.emplace_back(nullptr);
  }

  void stop() override {
    if (current_ == this) {
      current_ = outer_;
      events_.erase(std::remove(events_.begin(), events_.end(), nullptr), events_.end()); // of failed commands
    }
  }

  std::optional<std::pair<double, double>> since(NativeEvent& base) override;

 private:
  static inline thread_local OpenCLTimer* current_ = nullptr;

  const OpenCLFunctions& functions_; // of the launcher
  OpenCLTimer* const outer_;
  std::vector<void*> events_;
};

class OpenCLKernel final : public NativeKernel {
 public:
  OpenCLKernel(const OpenCLFunctions& functions, void* kernel, const std::string& text)
      : functions_(functions),
        kernel_(kernel),
        widths_(functions.finish == nullptr ? nullptr : &Widths::of(text)),
        bounded_(text.find(kBounded) != std::string::npos) {}

  void launch(
      void* queue, const LaunchSpec& size, c10::ArrayRef<LaunchArgument> arguments, uint64_t generation) override {
    // clSetKernelArg is not thread-safe, and a launch uses the arguments that were set last.
    const std::lock_guard<DeviceMutex> guard(mutex_);
    if (generation != generation_) {
      set_.clear(); // the same cl_mem value can be another buffer now
      generation_ = generation;
    }
    uint32_t index = 0;
    for (const LaunchArgument& argument : arguments) {
      if (argument.bytes == 0) {
        set(index++, sizeof argument.memory, &argument.memory);
        set(index++, sizeof argument.offset, &argument.offset);
      } else {
        set(index++, argument.bytes, argument.data);
      }
    }
    if (widths_ == nullptr) {
      enqueue(queue, size);
    } else {
      const std::lock_guard<DeviceMutex> widths(widths_->mutex);
      enqueue(queue, widths_->issue(queue, functions_.finish, size, bounded_));
    }
  }

 private:
  void enqueue(void* queue, const LaunchSpec& size) {
    const auto dimensions = size.global_size[2] > 1 ? 3 : size.global_size[1] > 1 ? 2 : 1;
    const Status status = functions_.enqueue(
        queue, kernel_, dimensions, nullptr, size.global_size.data(), size.group_size.data(), 0, nullptr,
        OpenCLTimer::event());
    if (C10_UNLIKELY(status != 0)) {
      throw NativeError{
          "clEnqueueNDRangeKernel", status,
          c10::str(
              " of ", c10::ArrayRef<size_t>(size.global_size), " work items in groups of ",
              c10::ArrayRef<size_t>(size.group_size))};
    }
  }

  // The last value of an argument. Longer arguments are set at each launch.
  struct Value {
    uint32_t bytes = 0;
    char data[12]; // makes the struct 16 bytes; handles and numbers need up to 8
  };

  void set(uint32_t index, uint32_t bytes, const void* data) {
    if (index >= set_.size()) {
      set_.resize(index + 1);
    }
    Value& known = set_[index];
    if (bytes == known.bytes && std::memcmp(known.data, data, bytes) == 0) {
      return;
    }
    known.bytes = 0; // unknown if the call fails
    const Status status = functions_.set_kernel_arg(kernel_, index, bytes, data);
    if (C10_UNLIKELY(status != 0)) {
      throw NativeError{"clSetKernelArg", status, c10::str(" of argument ", index, " with ", bytes, " bytes")};
    }
    if (bytes <= sizeof known.data) {
      known.bytes = bytes;
      std::memcpy(known.data, data, bytes);
    }
  }

  const OpenCLFunctions functions_;
  void* const kernel_;
  DeviceMutex mutex_;
  std::vector<Value> set_;
  uint64_t generation_ = 0;
  Widths* const widths_; // null if launches of different widths need no order
  const bool bounded_;
};

class OpenCLEvent final : public NativeEvent {
 public:
  explicit OpenCLEvent(const OpenCLFunctions& functions) : functions_(functions) {}

  void record(void* queue) override {
    void* event = nullptr;
    check("clEnqueueMarkerWithWaitList", functions_.marker(queue, 0, nullptr, &event));
    Marker marker(event, [release = functions_.release](void* one) { static_cast<void>(release(one)); });
    check("clFlush", functions_.flush(queue)); // other queues and polling threads can wait for it
    const std::lock_guard<std::mutex> guard(lock_);
    std::swap(marker_, marker); // the previous marker is released after the lock
  }

  void wait(void* queue) override {
    if (const Marker marker = latest()) {
      void* const event = marker.get();
      check("clEnqueueBarrierWithWaitList", functions_.barrier(queue, 1, &event, nullptr));
    }
  }

  bool query() override {
    const Marker marker = latest();
    return marker == nullptr || status(marker) == kComplete;
  }

  void synchronize() override {
    if (const Marker marker = latest()) {
      const GilReleased released; // the pending work can need the GIL
      void* const event = marker.get();
      const Status answer = functions_.wait(1, &event);
      status(marker); // throws the specific error; clWaitForEvents only returns a general one
      check("clWaitForEvents", answer);
    }
  }

  double elapsed_ms(NativeEvent& start) override {
    return milliseconds(end_of(static_cast<OpenCLEvent&>(start)), end_of(*this));
  }

  // Milliseconds from the recording of `base` to a timestamp.
  static double since(NativeEvent& base, uint64_t nanoseconds) {
    return milliseconds(end_of(static_cast<OpenCLEvent&>(base)), nanoseconds);
  }

 private:
  using Marker = std::shared_ptr<void>; // a recording

  static uint64_t end_of(const OpenCLEvent& event) {
    return moment(event.functions_, event.latest().get(), kCommandEnd);
  }

  static double milliseconds(uint64_t from, uint64_t to) {
    return static_cast<double>(static_cast<int64_t>(to - from)) / 1e6;
  }

  Marker latest() const {
    const std::lock_guard<std::mutex> guard(lock_);
    return marker_;
  }

  // The execution status of the marker. Throws if a command has failed.
  Status status(const Marker& marker) const {
    Status status = kComplete;
    check("clGetEventInfo", functions_.info(marker.get(), kExecutionStatus, sizeof status, &status, nullptr));
    if (C10_UNLIKELY(status < 0)) {
      throw NativeError{"a command before the event", status, ""};
    }
    return status;
  }

  const OpenCLFunctions& functions_; // of the launcher, which lives as long as the process
  mutable std::mutex lock_; // not held while OpenCL is called
  Marker marker_;
};

std::optional<std::pair<double, double>> OpenCLTimer::since(NativeEvent& base) {
  if (events_.empty()) {
    return std::nullopt;
  }
  {
    const GilReleased released; // the pending work can need the GIL
    if (functions_.wait(static_cast<uint32_t>(events_.size()), events_.data()) != 0) {
      return std::nullopt; // a command has failed; the next synchronization reports it
    }
  }
  return std::pair(
      OpenCLEvent::since(base, moment(functions_, events_.front(), kCommandStart)),
      OpenCLEvent::since(base, moment(functions_, events_.back(), kCommandEnd)));
}

class OpenCLLauncher final : public NativeLauncher {
 public:
  explicit OpenCLLauncher(const OpenCLFunctions& functions) : functions_(functions) {}

  const char* api() const override {
    return "opencl";
  }

  std::unique_ptr<NativeKernel> kernel(void* kernel, const std::string& text) const override {
    return std::make_unique<OpenCLKernel>(functions_, kernel, text);
  }

  void copy(void* queue, const LaunchArgument& destination, const LaunchArgument& source, size_t bytes) const override {
    check(
        "clEnqueueCopyBuffer",
        functions_.copy(
            queue, source.memory, destination.memory, source.offset, destination.offset, bytes, 0, nullptr,
            OpenCLTimer::event()));
  }

  void fill(void* queue, const LaunchArgument& memory, uint8_t value, size_t bytes) const override {
    check(
        "clEnqueueFillBuffer",
        functions_.fill(
            queue, memory.memory, &value, sizeof value, memory.offset, bytes, 0, nullptr, OpenCLTimer::event()));
  }

  void flush(void* queue) const override {
    check("clFlush", functions_.flush(queue));
  }

  bool copies_host_memory() const override {
    return functions_.write != nullptr;
  }

  void copy_in(void* queue, const LaunchArgument& to, const void* from, size_t bytes) const override {
    check(
        "clEnqueueWriteBuffer",
        functions_.write(queue, to.memory, /*blocking=*/0, to.offset, bytes, from, 0, nullptr, OpenCLTimer::event()));
  }

  void copy_out(void* queue, void* to, const LaunchArgument& from, size_t bytes) const override {
    check(
        "clEnqueueReadBuffer",
        functions_.read(queue, from.memory, /*blocking=*/0, from.offset, bytes, to, 0, nullptr, OpenCLTimer::event()));
  }

  bool has_events() const override {
    return functions_.marker != nullptr;
  }

  std::unique_ptr<NativeEvent> create_event(bool) const override {
    return std::make_unique<OpenCLEvent>(functions_); // timing is a property of the queue
  }

  std::unique_ptr<NativeTimer> time_commands() const override {
    return has_events() ? std::make_unique<OpenCLTimer>(functions_) : nullptr;
  }

  bool calls_host() const override {
    return functions_.enqueue_native != nullptr;
  }

  bool host_sees_memory() const override {
    return calls_host();
  }

  void call_host(void* queue, std::function<void()> function) const override {
    TORCH_CHECK(calls_host(), "the OpenCL device does not support host callbacks");
    auto call = std::make_unique<std::function<void()>>(std::move(function));
    void* words[] = {call.get()};
    enqueue_native(queue, &call_now, words, sizeof words, 0, nullptr, nullptr, OpenCLTimer::event());
    call.release(); // call_now owns it
  }

  HostMemory host_memory(void* queue, c10::ArrayRef<LaunchArgument> memory, uint64_t generation) const override {
    HostMemory seen;
    for (const LaunchArgument& one : memory) {
      seen.add(one.memory == nullptr ? nullptr : learn(queue, one.memory, generation), one.offset);
    }
    return seen;
  }

 private:
  // The host address of a buffer. Written by threads of the OpenCL implementation.
  using HostAddress = std::atomic<char*>;

  static void call_now(void* words) {
    const std::unique_ptr<std::function<void()>> call(*static_cast<std::function<void()>**>(words));
    (*call)();
  }

  // Returns the host address of a buffer, which a native kernel in the queue sets. The buffers of a processor do not
  // move, so each is queried once. Each is queried separately, because PoCL 3.1 mixes up the addresses of several
  // buffers.
  std::shared_ptr<HostAddress> learn(void* queue, void* buffer, uint64_t generation) const {
    std::shared_ptr<HostAddress> address;
    {
      std::lock_guard<std::mutex> guard(lock_);
      if (generation != generation_) {
        addresses_.clear(); // the same cl_mem value can be another buffer now
        generation_ = generation;
      }
      auto& known = addresses_[buffer];
      if (known == nullptr) {
        known = std::make_shared<HostAddress>(nullptr);
      }
      address = known;
    }
    if (address->load() == nullptr) {
      auto kept = std::make_unique<std::shared_ptr<HostAddress>>(address);
      void* words[] = {kept.get(), buffer};
      const void* place = &words[1];
      enqueue_native(queue, &learn_now, words, sizeof words, 1, &buffer, &place);
      kept.release(); // learn_now owns it
    }
    return address;
  }

  static void learn_now(void* words) {
    auto* const* given = static_cast<void* const*>(words);
    const std::unique_ptr<std::shared_ptr<HostAddress>> address(static_cast<std::shared_ptr<HostAddress>*>(given[0]));
    (*address)->store(static_cast<char*>(given[1]));
  }

  // OpenCL copies `words` and replaces the buffers in them with their host addresses.
  void enqueue_native(
      void* queue,
      void (*function)(void* words),
      void* words,
      size_t bytes,
      uint32_t count,
      void* const* buffers,
      const void** places,
      void** event = nullptr) const {
    check(
        "clEnqueueNativeKernel",
        functions_.enqueue_native(queue, function, words, bytes, count, buffers, places, 0, nullptr, event));
  }

  mutable std::mutex lock_;
  mutable std::unordered_map<void*, std::shared_ptr<HostAddress>> addresses_; // by buffer
  mutable uint64_t generation_ = 0;
  const OpenCLFunctions functions_;
};

template <typename Function>
Function find(const std::map<std::string, uintptr_t>& functions, const char* name) {
  return reinterpret_cast<Function>(function_of(functions, "opencl", name));
}

} // namespace

std::unique_ptr<NativeLauncher> make_opencl_launcher(const std::map<std::string, uintptr_t>& functions) {
  OpenCLFunctions found{
      find<SetKernelArg>(functions, "clSetKernelArg"), find<EnqueueNDRangeKernel>(functions, "clEnqueueNDRangeKernel"),
      find<EnqueueCopyBuffer>(functions, "clEnqueueCopyBuffer"),
      find<EnqueueFillBuffer>(functions, "clEnqueueFillBuffer"), find<Flush>(functions, "clFlush")};
  if (has_function(functions, "clFinish")) {
    found.finish = find<Finish>(functions, "clFinish");
  }
  if (has_function(functions, "clEnqueueNativeKernel")) {
    found.enqueue_native = find<EnqueueNativeKernel>(functions, "clEnqueueNativeKernel");
  }
  if (has_function(functions, "clEnqueueReadBuffer")) {
    found.read = find<EnqueueReadBuffer>(functions, "clEnqueueReadBuffer");
    found.write = find<EnqueueWriteBuffer>(functions, "clEnqueueWriteBuffer");
  }
  if (has_function(functions, "clEnqueueMarkerWithWaitList")) {
    found.marker = find<EnqueueWithWaitList>(functions, "clEnqueueMarkerWithWaitList");
    found.barrier = find<EnqueueWithWaitList>(functions, "clEnqueueBarrierWithWaitList");
    found.wait = find<WaitForEvents>(functions, "clWaitForEvents");
    found.info = find<EventInfo>(functions, "clGetEventInfo");
    found.profiling_info = find<EventInfo>(functions, "clGetEventProfilingInfo");
    found.release = find<ReleaseEvent>(functions, "clReleaseEvent");
  }
  return std::make_unique<OpenCLLauncher>(found);
}

} // namespace backplane
