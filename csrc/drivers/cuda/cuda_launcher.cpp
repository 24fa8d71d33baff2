#include "drivers/cuda/cuda_launcher.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "devices/device.h"
#include "drivers/cuda/cuda_calls.h"
#include "drivers/cuda/cuda_graph.h"

namespace backplane::cuda {

Api api;

namespace {

// --- contexts

class PrimaryContext {
 public:
  void set_device(int device) {
    device_ = device;
  }

  // Retains the context at the first call. It is never released: it lives as long as the process.
  int get(void** context) {
    *context = context_.load(std::memory_order_acquire);
    if (C10_LIKELY(*context != nullptr)) {
      return 0;
    }
    const std::lock_guard<std::mutex> guard(lock_);
    *context = context_.load(std::memory_order_relaxed);
    if (*context != nullptr) {
      return 0;
    }
    const int status = api.cuDevicePrimaryCtxRetain(context, device_);
    if (status == 0) {
      context_.store(*context, std::memory_order_release);
    }
    return status;
  }

 private:
  std::mutex lock_;
  std::atomic<void*> context_{nullptr};
  int device_ = 0;
};

std::array<PrimaryContext, kMostDevices> contexts;

// Makes a context current in this thread. Restores the previous one, which can be that of another library.
class Current {
 public:
  explicit Current(void* context) {
    void* now = nullptr;
    status = api.cuCtxGetCurrent(&now);
    if (status == 0 && now != context) {
      status = api.cuCtxPushCurrent_v2(context);
      is_pushed_ = status == 0;
    }
  }
  ~Current() {
    if (C10_UNLIKELY(is_pushed_)) {
      void* popped = nullptr;
      static_cast<void>(api.cuCtxPopCurrent_v2(&popped));
    }
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  int status = 0;

 private:
  bool is_pushed_ = false;
};

// The last call of this thread that has failed in a function of the contract. Functions that succeed do not change it:
// the runtime can call some before it asks.
struct Failure {
  const char* name = "";
  int status = 0;
};
thread_local Failure failure;

template <typename Body>
int in_context_of(size_t index, const Body& function) {
  const Failure before = std::exchange(failure, {});
  void* context = nullptr;
  if (const int status = contexts[index].get(&context)) {
    return status;
  }
  const Current current(context);
  const int status = current.status != 0 ? current.status : function();
  if (status == 0) {
    failure = before;
  }
  return status;
}

// --- host functions

// A thread that calls host functions of the runtime, one after another.
class HostThread {
 public:
  // Never destroyed: CUDA's threads can use it until the process ends.
  static HostThread& get() {
    static auto* const one = new HostThread;
    return *one;
  }

  // Returns when the function has returned.
  void call(const HostCall& call) {
    std::unique_lock<std::mutex> guard(lock_);
    if (!is_running_) {
      std::thread([this] { run(); }).detach();
      is_running_ = true;
    }
    Waiting waiting{call};
    waiting_.push_back(&waiting);
    changed_.notify_all();
    changed_.wait(guard, [&] { return waiting.is_done; });
  }

 private:
  struct Waiting {
    const HostCall& call;
    bool is_done = false;
  };

  void run() {
    std::unique_lock<std::mutex> guard(lock_);
    while (true) {
      changed_.wait(guard, [this] { return !waiting_.empty(); });
      Waiting* const next = waiting_.front();
      waiting_.pop_front();
      guard.unlock();
      next->call.function(next->call.argument);
      guard.lock();
      next->is_done = true;
      changed_.notify_all();
    }
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Waiting*> waiting_;
  bool is_running_ = false;
};

void call_once(void* given) {
  const std::unique_ptr<HostCall> call(static_cast<HostCall*>(given));
  call_host_function(call.get());
}

// --- the functions of the contract; the context of the device is current

int launch(
    void* queue,
    void* kernel,
    const uint64_t* items,
    const uint64_t* group,
    const CArgument* arguments,
    uint64_t count) {
  unsigned grid[3], block[3];
  if (const int status = blocks_of(items, group, grid, block)) {
    return status;
  }
  auto values = values_of(arguments, count);
  return api.cuLaunchKernel(
      kernel, grid[0], grid[1], grid[2], block[0], block[1], block[2], 0, queue, values.data(), nullptr);
}

struct LaunchSizes { // launch_t
  uint64_t items[3];
  uint64_t group[3];
  uint64_t dynamic_shared_memory;
  uint64_t cluster[3];
  uint64_t cooperative;
};

int launch_with_attributes(
    void* queue, void* kernel, const LaunchSizes* sizes, const CArgument* arguments, uint64_t count) {
  LaunchAttribute attributes[2] = {};
  LaunchConfig config{};
  if (const int status = blocks_of(sizes->items, sizes->group, config.grid, config.block)) {
    return status;
  }
  if (sizes->cooperative != 0) {
    LaunchAttribute& one = attributes[config.attribute_count++];
    one.id = kCooperative;
    one.value.cooperative = 1;
  }
  if (sizes->cluster[0] * sizes->cluster[1] * sizes->cluster[2] > 1) {
    LaunchAttribute& one = attributes[config.attribute_count++];
    one.id = kClusterDimension;
    std::copy(sizes->cluster, sizes->cluster + 3, one.value.cluster);
  }
  config.shared_memory = static_cast<unsigned>(sizes->dynamic_shared_memory);
  config.stream = queue;
  config.attributes = attributes;
  auto values = values_of(arguments, count);
  return api.cuLaunchKernelEx(&config, kernel, values.data(), nullptr);
}

int copy(void* queue, void* to, uint64_t, void* from, uint64_t, uint64_t bytes) {
  return api.cuMemcpyDtoDAsync_v2(address_of(to), address_of(from), bytes, queue);
}

int fill(void* queue, void* memory, uint64_t, uint64_t bytes, int value) {
  return api.cuMemsetD8Async(address_of(memory), static_cast<unsigned char>(value), bytes, queue);
}

int flush(void*) {
  return 0; // CUDA submits commands immediately
}

// Copies of memory that is not pinned can block, and the work before them can need the GIL.
int copy_in(void* queue, void* to, uint64_t, const void* from, uint64_t bytes) {
  const GilReleased released;
  return api.cuMemcpyHtoDAsync_v2(address_of(to), from, bytes, queue);
}

int copy_out(void* queue, void* to, void* from, uint64_t, uint64_t bytes) {
  const GilReleased released;
  return api.cuMemcpyDtoHAsync_v2(to, address_of(from), bytes, queue);
}

int create_event(int timing, void** event) {
  return api.cuEventCreate(event, timing != 0 ? 0 : kDisableTiming);
}

int destroy_event(void* event) {
  return api.cuEventDestroy_v2(event);
}

int record_event(void* event, void* queue) {
  return api.cuEventRecord(event, queue);
}

int wait_event(void* event, void* queue) {
  return api.cuStreamWaitEvent(queue, event, 0);
}

int query_event(void* event, int* is_reached) {
  const int status = api.cuEventQuery(event);
  *is_reached = status == 0 ? 1 : 0;
  return status == kNotReady ? 0 : status;
}

int synchronize_event(void* event) {
  return api.cuEventSynchronize(event);
}

int elapsed(void* start, void* end, double* milliseconds) {
  float found = 0;
  const int status = api.cuEventElapsedTime(&found, start, end);
  *milliseconds = found;
  return status;
}

int host_callback(void* queue, void (*function)(void*), void* argument) {
  auto call = std::make_unique<HostCall>(HostCall{function, argument});
  const int status = api.cuLaunchHostFunc(queue, &call_once, call.get());
  if (status == 0) {
    static_cast<void>(call.release()); // call_once owns it
  }
  return status;
}

int copy_from_peer(void* queue, void* to, uint64_t, void* from, uint64_t, uint64_t bytes) {
  return api.cuMemcpyAsync(address_of(to), address_of(from), bytes, queue); // an address tells its device
}

int wait_peer_event(void* event, void* queue) {
  void* context = nullptr; // the queue's
  if (const int status = api.cuStreamGetCtx(queue, &context)) {
    return status;
  }
  const Current current(context);
  return current.status != 0 ? current.status : api.cuStreamWaitEvent(queue, event, 0);
}

int export_memory(void* memory, char* handle) {
  return api.cuIpcGetMemHandle(reinterpret_cast<IpcHandle*>(handle), address_of(memory));
}

int import_memory(const char* handle, uint64_t, void** memory) {
  uint64_t address = 0;
  IpcHandle given;
  std::copy(handle, handle + sizeof given.bytes, given.bytes);
  const int status = api.cuIpcOpenMemHandle_v2(&address, given, kLazyPeerAccess);
  *memory = reinterpret_cast<void*>(address);
  return status;
}

int close_memory(void* memory) {
  return api.cuIpcCloseMemHandle(address_of(memory));
}

int create_shared_event(void** event) {
  return api.cuEventCreate(event, kDisableTiming | kInterprocess);
}

int export_event(void* event, char* handle) {
  return api.cuIpcGetEventHandle(reinterpret_cast<IpcHandle*>(handle), event);
}

int import_event(const char* handle, void** event) {
  IpcHandle given;
  std::copy(handle, handle + sizeof given.bytes, given.bytes);
  return api.cuIpcOpenEventHandle(event, given);
}

// --- the functions for each device

// A function of the contract has no argument for the device, so each device has separate functions.
template <size_t index, auto function>
struct OfDevice;

template <size_t index, typename... Arguments, int (*function)(Arguments...)>
struct OfDevice<index, function> {
  static int call(Arguments... arguments) {
    return in_context_of(index, [&] { return function(arguments...); });
  }
};

template <size_t index>
std::map<std::string, uintptr_t> functions_of() {
  std::map<std::string, uintptr_t> all;
#define BACKPLANE_CUDA_OF_DEVICE(name) all[#name] = reinterpret_cast<uintptr_t>(&OfDevice<index, &name>::call);
  BACKPLANE_CUDA_OF_DEVICE(launch)
  BACKPLANE_CUDA_OF_DEVICE(copy)
  BACKPLANE_CUDA_OF_DEVICE(fill)
  BACKPLANE_CUDA_OF_DEVICE(flush)
  BACKPLANE_CUDA_OF_DEVICE(launch_with_attributes)
  BACKPLANE_CUDA_OF_DEVICE(copy_in)
  BACKPLANE_CUDA_OF_DEVICE(copy_out)
  BACKPLANE_CUDA_OF_DEVICE(create_event)
  BACKPLANE_CUDA_OF_DEVICE(destroy_event)
  BACKPLANE_CUDA_OF_DEVICE(record_event)
  BACKPLANE_CUDA_OF_DEVICE(wait_event)
  BACKPLANE_CUDA_OF_DEVICE(query_event)
  BACKPLANE_CUDA_OF_DEVICE(synchronize_event)
  BACKPLANE_CUDA_OF_DEVICE(elapsed)
  BACKPLANE_CUDA_OF_DEVICE(host_callback)
  BACKPLANE_CUDA_OF_DEVICE(copy_from_peer)
  BACKPLANE_CUDA_OF_DEVICE(wait_peer_event)
  BACKPLANE_CUDA_OF_DEVICE(export_memory)
  BACKPLANE_CUDA_OF_DEVICE(import_memory)
  BACKPLANE_CUDA_OF_DEVICE(close_memory)
  BACKPLANE_CUDA_OF_DEVICE(create_shared_event)
  BACKPLANE_CUDA_OF_DEVICE(export_event)
  BACKPLANE_CUDA_OF_DEVICE(import_event)
  BACKPLANE_CUDA_OF_DEVICE(graph_create)
  BACKPLANE_CUDA_OF_DEVICE(graph_update)
  BACKPLANE_CUDA_OF_DEVICE(graph_launch)
  BACKPLANE_CUDA_OF_DEVICE(graph_destroy)
  BACKPLANE_CUDA_OF_DEVICE(begin_capture)
  BACKPLANE_CUDA_OF_DEVICE(end_capture)
  BACKPLANE_CUDA_OF_DEVICE(destroy_captured)
#undef BACKPLANE_CUDA_OF_DEVICE
  return all;
}

template <size_t... indices>
std::map<std::string, uintptr_t> functions_of(size_t index, std::index_sequence<indices...>) {
  using Make = std::map<std::string, uintptr_t> (*)();
  static constexpr Make kAll[] = {&functions_of<indices>...};
  return kAll[index]();
}

void sleep_now(void* given) {
  const std::unique_ptr<double> milliseconds(static_cast<double*>(given));
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(*milliseconds));
}

} // namespace

void note_failure(const char* name, int status) {
  failure = {name, status};
}

std::string take_failed_call(int status) {
  const Failure last = std::exchange(failure, {});
  return last.status == status ? last.name : "";
}

int call_in_context(size_t index, c10::function_ref<int()> function) {
  int status = 0;
  const int failed = in_context_of(index, [&] {
    status = function();
    return status < 0 ? -status : 0;
  });
  return failed != 0 ? -failed : status;
}

void call_host_function(void* given) {
  HostThread::get().call(*static_cast<HostCall*>(given));
}

std::vector<std::string> function_names() {
#define BACKPLANE_CUDA_NAME(name, parameters) #name,
  return {BACKPLANE_CUDA_FUNCTIONS(BACKPLANE_CUDA_NAME)};
#undef BACKPLANE_CUDA_NAME
}

std::map<std::string, uintptr_t> make_launcher(
    const std::map<std::string, uintptr_t>& functions, size_t index, int device) {
  TORCH_CHECK_VALUE(index < kMostDevices, "device ", index, " is not one of the first ", kMostDevices, " CUDA devices");
#define BACKPLANE_CUDA_LOAD(name, parameters) \
  api.name = {#name, reinterpret_cast<int(*) parameters>(function_of(functions, "CUDA", #name))};
  BACKPLANE_CUDA_FUNCTIONS(BACKPLANE_CUDA_LOAD)
#undef BACKPLANE_CUDA_LOAD
  contexts[index].set_device(device);
  return functions_of(index, std::make_index_sequence<kMostDevices>());
}

std::pair<int, uintptr_t> context(size_t index) {
  void* found = nullptr;
  const int status = contexts.at(index).get(&found);
  return {status, reinterpret_cast<uintptr_t>(found)};
}

int sleep(size_t index, uintptr_t stream, double milliseconds) {
  return in_context_of(index, [&] {
    auto given = std::make_unique<double>(milliseconds);
    const int status = api.cuLaunchHostFunc(reinterpret_cast<void*>(stream), &sleep_now, given.get());
    if (status == 0) {
      static_cast<void>(given.release()); // sleep_now owns it
    }
    return status;
  });
}

} // namespace backplane::cuda
