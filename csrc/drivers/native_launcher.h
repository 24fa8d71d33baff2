// Kernel launches, copies and fills without Python, for hardware APIs that the runtime can call.
//
// The driver loads the API's library with its Python binding and passes the addresses of its functions
// (torch_backplane.drivers.base.NativeLauncher). The runtime does not link against the library.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "devices/device.h"
#include "devices/interprocess.h"

namespace backplane {

// An argument of a launch: memory if `bytes` is 0, else a number of `bytes` bytes at `data`.
struct LaunchArgument {
  void* memory; // the handle of the segment; null for a null pointer
  uint64_t offset; // bytes from the start of the segment
  const void* data;
  uint32_t bytes;
};

// The same for C launchers and library functions: argument_t in docs/driver-contract.md.
struct CArgument {
  void* memory;
  uint64_t offset;
  const void* data;
  uint64_t bytes;
};
c10::SmallVector<CArgument, 32> c_arguments(c10::ArrayRef<LaunchArgument> arguments);

// Thrown if a function of the hardware API returns an error.
struct NativeError {
  const char* call; // the name of the function
  int status; // its return value
  std::string details; // " of 3 work items": the arguments of the call; can be empty
};

// Throws NativeError unless `status` is 0.
inline void check_status(const char* call, int status) {
  if (C10_UNLIKELY(status != 0)) {
    throw NativeError{call, status, ""};
  }
}

// A compiled kernel. Thread-safe; needs no GIL.
class NativeKernel {
 public:
  virtual ~NativeKernel() = default;
  // `generation` changes when a handle can refer to other memory than before. Throws NativeError.
  virtual void launch(
      void* queue, const LaunchSpec& size, c10::ArrayRef<LaunchArgument> arguments, uint64_t generation) = 0;
};

// An event of the hardware API. Thread-safe; needs no GIL. Throws NativeError. Waits that were issued stay in effect
// after the event is destroyed.
class NativeEvent {
 public:
  virtual ~NativeEvent() = default;
  virtual void record(void* queue) = 0; // repeatable; the other methods refer to the latest recording
  virtual void wait(void* queue) = 0; // makes the queue wait; no effect if the event was never recorded
  virtual bool query() = 0; // true if the event is reached, or was never recorded
  virtual void synchronize() = 0;
  virtual double elapsed_ms(NativeEvent& start) = 0; // since `start`, an event of the same API; both are reached
  // Like wait(), for a queue of another device. Requires NativeLauncher::waits_for_peers().
  virtual void wait_on_peer(void* queue);
};

// Like CommandTimer, for a queue of the hardware API.
class NativeTimer {
 public:
  virtual ~NativeTimer() = default;
  virtual void stop() = 0;
  virtual std::optional<std::pair<double, double>> since(NativeEvent& base) = 0; // throws NativeError
};

// Host addresses of ranges of device memory.
class HostMemory {
 public:
  using Start = std::shared_ptr<const std::atomic<char*>>; // host address of a buffer; set when the queue reports it

  void add(Start start, uint64_t offset) {
    starts_.emplace_back(std::move(start), offset);
  }

  c10::SmallVector<char*, 8> addresses() const {
    c10::SmallVector<char*, 8> all;
    for (const auto& [start, offset] : starts_) {
      all.push_back(start == nullptr ? nullptr : start->load() + offset); // null: an empty range
    }
    return all;
  }

 private:
  std::vector<std::pair<Start, uint64_t>> starts_;
};

// Sharing of memory and events between processes. Thread-safe; needs no GIL. Throws NativeError.
class NativeInterprocess {
 public:
  virtual ~NativeInterprocess() = default;
  virtual InterprocessHandle export_memory(void* memory) const = 0;
  virtual void* import_memory(const InterprocessHandle& handle, size_t bytes) const = 0;
  virtual void close_memory(void* memory) const = 0;
  virtual std::unique_ptr<NativeEvent> create_event() const = 0;
  virtual InterprocessHandle export_event(NativeEvent& event) const = 0;
  virtual std::unique_ptr<NativeEvent> import_event(const InterprocessHandle& handle) const = 0;
};

struct GraphFunctions; // drivers/driver_graph.h
struct CaptureFunctions;

class NativeLauncher {
 public:
  virtual ~NativeLauncher() = default;
  // "opencl" or "c".
  virtual const char* api() const = 0;
  // `kernel` outlives the returned object. `text` is its source; empty for a binary.
  virtual std::unique_ptr<NativeKernel> kernel(void* kernel, const std::string& text) const = 0;
  // Whether launches can have attributes. If false, no LaunchSpec has any.
  virtual bool launches_with_attributes() const {
    return false;
  }
  // Copies within the device. The ranges do not overlap.
  virtual void copy(
      void* queue, const LaunchArgument& destination, const LaunchArgument& source, size_t bytes) const = 0;
  virtual void fill(void* queue, const LaunchArgument& memory, uint8_t value, size_t bytes) const = 0;
  // Submits the commands in the queue to the device. Throws NativeError.
  virtual void flush(void* queue) const = 0;

  // Copies from and to host memory. Require copies_host_memory().
  virtual bool copies_host_memory() const {
    return false;
  }
  virtual void copy_in(void* queue, const LaunchArgument& to, const void* from, size_t bytes) const;
  virtual void copy_out(void* queue, void* to, const LaunchArgument& from, size_t bytes) const;

  // Events of the API. create_event() requires has_events().
  virtual bool has_events() const {
    return false;
  }
  virtual std::unique_ptr<NativeEvent> create_event(bool timing) const;
  // Measures the commands that the calling thread submits through this launcher. Null: use events.
  virtual std::unique_ptr<NativeTimer> time_commands() const {
    return nullptr;
  }

  // Host callbacks in stream order, without blocking the caller. The function must not throw.
  virtual bool calls_host() const {
    return false;
  }
  virtual void call_host(void* queue, std::function<void()> function) const;
  // Whether the host can access device memory at the addresses of host_memory().
  virtual bool host_sees_memory() const {
    return false;
  }
  // Host addresses of device memory. They are known when the queue runs a later host callback. `generation`: see
  // NativeKernel::launch.
  virtual HostMemory host_memory(void* queue, c10::ArrayRef<LaunchArgument> memory, uint64_t generation) const;

  // Copies, in stream order, from the memory of another device of the driver.
  virtual bool copies_from_peers() const {
    return false;
  }
  virtual void copy_from_peer(void* queue, const LaunchArgument& to, const LaunchArgument& from, size_t bytes) const;
  // Whether queues can wait for events of other devices of the driver (NativeEvent::wait_on_peer).
  virtual bool waits_for_peers() const {
    return false;
  }

  // Null: not supported.
  virtual const NativeInterprocess* interprocess() const {
    return nullptr;
  }
  virtual const GraphFunctions* graphs() const {
    return nullptr;
  }
  // The capture of library calls. Requires graphs().
  virtual const CaptureFunctions* captures() const {
    return nullptr;
  }
};

// Makes the launcher of an API. Throws ValueError for an unknown API, or if a required function is missing.
std::unique_ptr<NativeLauncher> make_native_launcher(
    const std::string& api, const std::map<std::string, uintptr_t>& functions);

// Whether the function is there. For a group, it is enough to check one function.
bool has_function(const std::map<std::string, uintptr_t>& functions, const char* name);
// The address of a function. Throws ValueError if it is missing.
uintptr_t function_of(const std::map<std::string, uintptr_t>& functions, const char* api, const char* name);

} // namespace backplane
