// Kernel launches, copies and fills without Python, for drivers whose hardware API the runtime knows.
//
// The driver loads the API's library with its Python binding and hands over the addresses of a few functions in it
// (torch_backplane.drivers.base.NativeLauncher); the runtime links no such library.
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

// One argument of a launch: memory where `bytes` is 0, otherwise that many bytes at `data`.
struct LaunchArgument {
  void* memory; // the driver's handle of the segment; nullptr for no memory
  uint64_t offset; // bytes from its start
  const void* data;
  uint32_t bytes;
};

// The same, as functions of a driver's own launcher and of libraries have it: docs/write-a-driver.md declares it.
struct CArgument {
  void* memory;
  uint64_t offset;
  const void* data;
  uint64_t bytes;
};
c10::SmallVector<CArgument, 32> c_arguments(c10::ArrayRef<LaunchArgument> arguments);

// Thrown where a function of the hardware API answers with an error.
struct NativeError {
  const char* call; // the function
  int status; // what it answered
  std::string details; // «… with 3 work items»: what it was called with; may be empty
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
  // `generation` changes whenever a handle may have come to mean other memory. Throws NativeError.
  virtual void launch(
      void* queue, const LaunchSpec& size, c10::ArrayRef<LaunchArgument> arguments, uint64_t generation) = 0;
};

// An event of the hardware API's. Thread-safe; needs no GIL. Throws NativeError. When it goes, waits for it that were
// issued stay in force.
class NativeEvent {
 public:
  virtual ~NativeEvent() = default;
  virtual void record(void* queue) = 0; // again and again; the others mean the latest recording
  virtual void wait(void* queue) = 0; // the queue does; does nothing where it was never recorded
  virtual bool query() = 0; // true: reached, or never recorded
  virtual void synchronize() = 0;
  virtual double elapsed_ms(NativeEvent& start) = 0; // since `start`, an event of the same API; both are reached
  // As wait(), for a queue of another device; only where its launcher waits_for_peers().
  virtual void wait_on_peer(void* queue);
};

// As CommandTimer, of a queue of the hardware API's.
class NativeTimer {
 public:
  virtual ~NativeTimer() = default;
  virtual void stop() = 0;
  virtual std::optional<std::pair<double, double>> since(NativeEvent& base) = 0; // throws NativeError
};

// Where the host sees pieces of memory.
class HostMemory {
 public:
  using Start = std::shared_ptr<const std::atomic<char*>>; // of a buffer, once it is known

  void add(Start start, uint64_t offset) {
    starts_.emplace_back(std::move(start), offset);
  }

  c10::SmallVector<char*, 8> addresses() const {
    c10::SmallVector<char*, 8> all;
    for (const auto& [start, offset] : starts_) {
      all.push_back(start == nullptr ? nullptr : start->load() + offset); // null: of no bytes
    }
    return all;
  }

 private:
  std::vector<std::pair<Start, uint64_t>> starts_;
};

// Memory and events that processes share. Thread-safe; needs no GIL. Throws NativeError.
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

class NativeLauncher {
 public:
  virtual ~NativeLauncher() = default;
  // "opencl" or "c".
  virtual const char* api() const = 0;
  // `kernel` stays valid as long as what is returned lives; `text` is what it was built from.
  virtual std::unique_ptr<NativeKernel> kernel(void* kernel, const std::string& text) const = 0;
  // Whether kernels are launched with LaunchSpec's attributes; else the specs have none.
  virtual bool launches_with_attributes() const {
    return false;
  }
  // Within the device's memory; the ranges do not overlap.
  virtual void copy(
      void* queue, const LaunchArgument& destination, const LaunchArgument& source, size_t bytes) const = 0;
  virtual void fill(void* queue, const LaunchArgument& memory, uint8_t value, size_t bytes) const = 0;
  // Makes sure that what the queue was given gets to the device without another call. Throws NativeError.
  virtual void flush(void* queue) const = 0;

  // Host memory, as Device::copy; only where copies_host_memory().
  virtual bool copies_host_memory() const {
    return false;
  }
  virtual void copy_in(void* queue, const LaunchArgument& to, const void* from, size_t bytes) const;
  virtual void copy_out(void* queue, void* to, const LaunchArgument& from, size_t bytes) const;

  // Events of the API's, where the driver has handed over what they need.
  virtual bool has_events() const {
    return false;
  }
  virtual std::unique_ptr<NativeEvent> create_event(bool timing) const;
  // Times what the calling thread gives to queues through this. Null: the API has nothing better than events.
  virtual std::unique_ptr<NativeTimer> time_commands() const {
    return nullptr;
  }

  // Host callbacks in stream order, without blocking the caller. The function does not throw.
  virtual bool calls_host() const {
    return false;
  }
  virtual void call_host(void* queue, std::function<void()> function) const;
  // True where the launcher knows how the host reaches device memory: by host_memory().
  virtual bool host_sees_memory() const {
    return false;
  }
  // Host addresses of memory, known to functions that the queue calls after this; `generation` as in NativeKernel::launch.
  virtual HostMemory host_memory(void* queue, c10::ArrayRef<LaunchArgument> memory, uint64_t generation) const;

  // Copies in stream order from the memory of another device of the driver.
  virtual bool copies_from_peers() const {
    return false;
  }
  virtual void copy_from_peer(void* queue, const LaunchArgument& to, const LaunchArgument& from, size_t bytes) const;
  // Whether queues wait for events of other devices of the driver (NativeEvent::wait_on_peer).
  virtual bool waits_for_peers() const {
    return false;
  }

  // Null: not offered.
  virtual const NativeInterprocess* interprocess() const {
    return nullptr;
  }
  virtual const GraphFunctions* graphs() const {
    return nullptr;
  }
};

// The launcher of an API; throws for one that the runtime does not know, and where a function is missing.
std::unique_ptr<NativeLauncher> make_native_launcher(
    const std::string& api, const std::map<std::string, uintptr_t>& functions);

// Whether there is the first of functions that only work together.
bool has_function(const std::map<std::string, uintptr_t>& functions, const char* name);
// The address of an API's function; throws where it is missing.
uintptr_t function_of(const std::map<std::string, uintptr_t>& functions, const char* api, const char* name);

} // namespace backplane
