// The interface of a device to the runtime, and the table of all devices.
//
// A `Device` is either native (csrc/drivers/host/host_device.cpp) or the adapter around a Python driver
// (csrc/drivers/driver_device.cpp). Everything above this header (allocator, streams, copies, fallback) accesses
// hardware only through it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "devices/command.h"
#include "devices/command_timer.h"
#include "devices/native_graph.h"
#include "devices/prerequisite.h"

namespace backplane {

class Interprocess;

// The kind of a device's addresses, which its tensors return from data_ptr().
enum class Addresses : uint8_t {
  Synthetic, // reserved by the runtime, for memory that is an opaque handle (address_space.h)
  Host, // the CPU can dereference them
  Device, // the hardware's pointers, which the CPU cannot dereference
};

struct DeviceProperties {
  std::string driver; // short driver name: "host", "opencl", …
  std::string name; // the hardware's name
  uint64_t total_memory = 0; // bytes
  uint64_t largest_allocation = ~uint64_t{0}; // maximum bytes of one allocate()
  Addresses addresses = Addresses::Synthetic;
  int compute_units = 1; // torch.cuda's multi_processor_count
  int major = 0; // capability, as the driver defines it
  int minor = 0;
  uint64_t dtypes = ~uint64_t{0}; // bit i: c10::ScalarType(i) is supported
  std::string dialect; // the kernel language that compile() accepts: "OpenCL C", …; empty: no kernels
  uint64_t local_memory = 0; // bytes per group, static and dynamic; for devices with kernels
  std::string kind = "accelerator"; // the kind of hardware: "gpu", "accelerator", "cpu" or "host"

  // True if the CPU can dereference device addresses.
  bool host_accessible() const {
    return addresses == Addresses::Host;
  }
  bool supports(c10::ScalarType dtype) const {
    return (dtypes >> static_cast<int>(dtype)) & 1;
  }
};

// The source or binary of a kernel.
struct KernelSource {
  std::string code; // text in the device's dialect, or a binary
  std::string entry;
  std::string operator_name; // for messages
  bool is_binary = false;
};

// The compiler's report on a kernel; nullopt where it reports nothing.
struct KernelResources {
  std::optional<int64_t> registers; // per work item
  std::optional<int64_t> spilled_bytes; // per work item
  std::optional<int64_t> static_shared_memory; // bytes per group
};

// Contract of every method: thread-safe; errors are thrown as exceptions (c10::Error or a Python error), except where
// a return value reports them. A device address is an address from `allocate` or `reserve` plus any offset inside.
class Device {
 public:
  explicit Device(DeviceProperties properties) : properties_(std::move(properties)) {}
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const DeviceProperties& properties() const {
    return properties_;
  }

  // True if the methods below run Python code, which can hand the GIL to another thread at any time. Callers must not
  // hold a lock of the runtime: a thread with the GIL could be waiting for that lock, and the two would deadlock.
  virtual bool needs_gil() const {
    return false;
  }

  // --- loss ----------------------------------------------------------------------------------------------------------
  // True once the hardware has stopped working for the rest of the process. Every method then throws the reason, except
  // those that release something.
  virtual bool is_lost() const noexcept {
    return false;
  }
  // Throws the reason if the device is lost.
  virtual void check_not_lost() const {}

  // --- memory --------------------------------------------------------------------------------------------------------
  // A new range of `bytes` bytes, aligned to at least 512 bytes; nullptr if the device is out of memory.
  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* address, size_t bytes) = 0;
  // {free, total} in bytes.
  virtual std::pair<size_t, size_t> memory_info() = 0;

  // Expandable segments: address space that is reserved first and backed by memory piecewise.
  virtual bool can_reserve() const {
    return false;
  }
  virtual void* reserve(size_t bytes); // throws when !can_reserve()
  virtual void unreserve(void* address, size_t bytes);
  virtual bool map(void* address, size_t bytes); // false: not enough memory
  virtual void unmap(void* address, size_t bytes);

  // Page-locked host memory, which the device can read and write by itself. A device implements both methods or
  // neither.
  virtual bool can_pin() const {
    return false;
  }
  // Returns the argument of unpin(). Throws OutOfMemoryError if no more memory can be pinned.
  virtual void* pin(void* memory, size_t bytes);
  virtual void unpin(void* pinned); // no transfer may use the memory any more

  // --- streams -------------------------------------------------------------------------------------------------------
  virtual StreamHandle create_stream(int priority) = 0;
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;
  virtual bool query_stream(StreamHandle stream) = 0; // true: all work has completed
  virtual void synchronize_stream(StreamHandle stream) = 0;
  // The hardware API's handle of the stream's queue. From then on other code can submit work that the runtime does not
  // see. Throws NotImplementedError if there is no such handle.
  virtual uintptr_t native_handle(StreamHandle stream);
  // Creates a stream around a queue of the hardware API, whose owner keeps it alive. Equal queues give equal streams.
  virtual bool can_adopt_streams() const {
    return false;
  }
  virtual StreamHandle adopt_stream(uintptr_t native);

  // --- events --------------------------------------------------------------------------------------------------------
  virtual EventHandle create_event(bool timing) = 0;
  virtual void destroy_event(EventHandle event) noexcept = 0;
  virtual bool query_event(EventHandle event) = 0; // true: completed, or never recorded
  virtual void synchronize_event(EventHandle event) = 0;
  virtual double elapsed_ms(EventHandle start, EventHandle end) = 0; // both recorded with timing and completed

  // --- commands ------------------------------------------------------------------------------------------------------
  // Submits a command to the stream, which executes commands in the order of submission. Generally returns before the
  // command has completed. Throws NotImplementedError for a kind that the device does not support: kernels need a
  // dialect, library calls need a queue_api(), host callbacks with memory need host_sees_memory().
  virtual void submit(const Command& command, StreamHandle stream) = 0;
  // Copies from another device's memory to this device's without staging on the host; false: not possible.
  virtual bool copy_from_peer(void* destination, Device& peer, const void* source, size_t bytes, StreamHandle stream);
  virtual bool can_access_peer(const Device& peer) const;
  // Like EventWait, for an event of another device; false: not possible, so the host must wait.
  virtual bool wait_for_peer(Device& peer, EventHandle event, StreamHandle stream);
  // Makes the stream wait for a signal of the host; false: not possible, so a host callback or the caller must wait. If
  // the signal carries an error, the stream's next use or synchronization throws it.
  virtual bool wait_for_signal(c10::intrusive_ptr<HostSignal> signal, StreamHandle stream) {
    return false;
  }

  // --- kernels, on devices with a dialect ----------------------------------------------------------------------------
  // Creates a kernel from text or a binary. Can return before text is built: launches then wait for the build in stream
  // order, and the stream's next synchronization throws the compiler's errors, which name the operator.
  virtual KernelHandle compile(KernelSource source);
  virtual void destroy_kernel(KernelHandle kernel) noexcept;
  // Waits until the kernel is built. Throws the error of the build.
  virtual KernelResources kernel_resources(KernelHandle kernel);

  // --- optional abilities --------------------------------------------------------------------------------------------
  // The API of the native queue that library calls receive: "opencl", or the driver's name if the driver has its own
  // launcher. Empty: library calls are not supported.
  virtual std::string queue_api() const {
    return {};
  }
  // True if the host can read and write the device's memory in stream order. Host callbacks can then take memory.
  virtual bool host_sees_memory() const {
    return false;
  }
  // True for devices without kernels whose streams execute in their own threads. PyTorch's CPU kernels are then
  // submitted to the stream as host callbacks (fallback/deferred.h) instead of running in the calling thread.
  virtual bool defers_operators() const {
    return false;
  }

  // Memory and events that other processes can open (devices/interprocess.h); nullptr: not supported.
  virtual Interprocess* interprocess() {
    return nullptr;
  }
  // A native graph of the commands; nullptr: not supported for them. `commands` is valid only during the call.
  virtual std::unique_ptr<NativeGraph> instantiate(c10::ArrayRef<GraphCommand> commands);

  // --- profiles ------------------------------------------------------------------------------------------------------
  // Times the commands that the calling thread submits to the stream until CommandTimer::stop(). Earlier commands that
  // wait for a kernel build are submitted to the driver first. This default records an event before the commands and
  // one after them; devices that know when a command ran override it.
  virtual std::unique_ptr<CommandTimer> time_commands(StreamHandle stream);

  // Keeps the stream busy for about `milliseconds` (for tests and demonstrations, like torch.cuda._sleep).
  virtual void sleep(double milliseconds, StreamHandle stream);

 private:
  DeviceProperties properties_;
};

// Holds the GIL during its lifetime if the device's methods run Python; costs nothing otherwise. The methods take the
// GIL themselves; this makes consecutive calls cheaper. Must not be created while a lock of the runtime is held.
class DeviceCall {
 public:
  explicit DeviceCall(const Device& device) : DeviceCall(device.needs_gil()) {}
  explicit DeviceCall(bool needs_gil);
  ~DeviceCall();
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

 private:
  int gil_state_ = -1;
};

// Submission blocks while about this many commands of a stream are pending, as in CUDA. Each pending command takes
// memory, and a program that does not synchronize can submit commands faster than they complete.
constexpr int64_t kMaxWaiting = 1024;

// Releases the GIL during its lifetime, if this thread holds it, for waits on work that may need Python.
class GilReleased {
 public:
  GilReleased();
  ~GilReleased();
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  void* saved_ = nullptr;
};

// --- the table of devices --------------------------------------------------------------------------------------------
// Filled once, at first use, by torch_backplane.drivers.discovery.discover(), and constant afterwards.

void add_device(std::unique_ptr<Device> device);
// The index that the next add_device() will use.
c10::DeviceIndex next_device_index() noexcept;
// Called by Python at the end of discovery.
void finish_discovery();
// True once discovery is finished. Does not start it.
bool is_discovered() noexcept;
// The number of devices; discovers them if necessary. 0 if discovery fails or in_bad_fork() is true.
c10::DeviceIndex device_count() noexcept;
// Device `index` (-1: the current one). Throws if the index is out of range or in_bad_fork() is true.
Device& device(c10::DeviceIndex index);
// `index`, or the current device's index for -1. Throws like `device`.
c10::DeviceIndex checked_index(c10::DeviceIndex index);

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index); // checks the range
void set_current_device_unchecked(c10::DeviceIndex index) noexcept;
c10::DeviceIndex exchange_current_device(c10::DeviceIndex index);

// True in a child that was forked after its parent had used devices or discovered devices of a Python driver.
bool in_bad_fork() noexcept;
void check_not_forked();

} // namespace backplane
