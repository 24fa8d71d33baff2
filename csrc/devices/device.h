// One device, as the runtime sees it, and the table of all devices.
//
// A `Device` is either native (csrc/drivers/host/host_device.cpp) or the adapter around a Python driver
// (csrc/drivers/driver_device.cpp). Everything above this header (allocator, streams, copies, fallback) talks to
// hardware through it and through nothing else.
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

namespace backplane {

class Interprocess;

// What a device's addresses are, which tensors have as data_ptr().
enum class Addresses : uint8_t {
  Synthetic, // reserved by the runtime, for memory that has a handle instead
  Host, // the CPU may dereference them
  Device, // the hardware's own pointers, which the CPU may not dereference
};

struct DeviceProperties {
  std::string driver; // short driver name: "host", "opencl", …
  std::string name; // what the hardware calls itself
  uint64_t total_memory = 0; // bytes
  Addresses addresses = Addresses::Synthetic;
  int compute_units = 1; // torch.cuda's multi_processor_count
  int major = 0; // capability, as the driver defines it
  int minor = 0;
  uint64_t dtypes = ~uint64_t{0}; // bit i: c10::ScalarType(i) is supported
  std::string dialect; // which kernel language compile() takes: "OpenCL C", …; empty: it runs no kernels
  uint64_t local_memory = 0; // bytes that a group may share, static and dynamic; of devices with kernels
  std::string kind = "accelerator"; // what hardware it is: "gpu", "accelerator", "cpu" or "host"

  // The CPU may dereference device addresses.
  bool host_accessible() const {
    return addresses == Addresses::Host;
  }
  bool supports(c10::ScalarType dtype) const {
    return (dtypes >> static_cast<int>(dtype)) & 1;
  }
};

// What a kernel is made from.
struct KernelSource {
  std::string code; // text in the device's dialect, or a binary
  std::string entry;
  std::string operator_name; // for messages
  bool is_binary = false;
};

// What the compiler says of a kernel; what it does not report is absent.
struct KernelResources {
  std::optional<int64_t> registers; // per work item
  std::optional<int64_t> spilled_bytes; // per work item
  std::optional<int64_t> static_shared_memory; // bytes per group
};

// Contract of every method: thread-safe; errors are thrown as exceptions (c10::Error or a Python error), except where
// a return value is named. Device addresses are what `allocate` or `reserve` returned plus any offset inside.
class Device {
 public:
  explicit Device(DeviceProperties properties) : properties_(std::move(properties)) {}
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const DeviceProperties& properties() const {
    return properties_;
  }

  // True where the methods below run Python code, which may hand the GIL to another thread at any time. So no lock of
  // ours may be held around a call: a thread with the GIL could be waiting for the lock, and the two would deadlock.
  virtual bool needs_gil() const {
    return false;
  }

  // --- loss ----------------------------------------------------------------------------------------------------------
  // True once the hardware has stopped working for the rest of the process. Then every method throws why, except those
  // that give something back.
  virtual bool is_lost() const noexcept {
    return false;
  }
  // Throws why, if it is lost.
  virtual void check_not_lost() const {}

  // --- memory ------------------------------------------------------------------------------------------------------
  // A new range of `bytes` bytes, at least 512-byte aligned; nullptr when the device has not enough memory.
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

  // Host memory that the device transfers from and to by itself, as it cannot be paged out. Both or none.
  virtual bool can_pin() const {
    return false;
  }
  // What unpin() gets; throws OutOfMemoryError where there is no more to be had.
  virtual void* pin(void* memory, size_t bytes);
  virtual void unpin(void* pinned); // when no transfer uses the memory any more

  // --- streams -----------------------------------------------------------------------------------------------------
  virtual StreamHandle create_stream(int priority) = 0;
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;
  virtual bool query_stream(StreamHandle stream) = 0; // true: all work done
  virtual void synchronize_stream(StreamHandle stream) = 0;
  // The hardware API's handle of the stream's queue. From then on others may give the queue work that the runtime does not see.
  // Throws NotImplementedError where there is none.
  virtual uintptr_t native_handle(StreamHandle stream);
  // A stream around a queue of the hardware API's that is kept alive elsewhere: the same stream for the same queue.
  virtual bool can_adopt_streams() const {
    return false;
  }
  virtual StreamHandle adopt_stream(uintptr_t native);

  // --- events ------------------------------------------------------------------------------------------------------
  virtual EventHandle create_event(bool timing) = 0;
  virtual void destroy_event(EventHandle event) noexcept = 0;
  virtual bool query_event(EventHandle event) = 0; // true: reached, or never recorded
  virtual void synchronize_event(EventHandle event) = 0;
  virtual double elapsed_ms(EventHandle start, EventHandle end) = 0; // both recorded with timing, both reached

  // --- commands ------------------------------------------------------------------------------------------------------
  // Gives the stream a command, which it executes in the order of submission. Returns before the command is done, in general.
  // Throws NotImplementedError for a kind that the device does not offer: kernels need a dialect, library calls a
  // queue_api(), host callbacks with memory host_sees_memory().
  virtual void submit(const Command& command, StreamHandle stream) = 0;
  // Copies from another device's memory into this one's without passing through the host; false: not possible.
  virtual bool copy_from_peer(
      void* destination, Device& peer, const void* source, size_t bytes, StreamHandle stream);
  virtual bool can_access_peer(const Device& peer) const;
  // As an EventWait, for an event of another device; false: not possible, so that the host has to wait.
  virtual bool wait_for_peer(Device& peer, EventHandle event, StreamHandle stream);

  // --- kernels, on devices with a dialect ------------------------------------------------------------------------------
  // A kernel from its text, or from a binary. May return before text is built: then launches wait for it in stream order, and
  // an error of the compiler's is thrown by the stream's next synchronization, naming the operator.
  virtual KernelHandle compile(KernelSource source);
  virtual void destroy_kernel(KernelHandle kernel) noexcept;
  // Waits until the kernel is built; throws what the build failed with.
  virtual KernelResources kernel_resources(KernelHandle kernel);

  // --- optional abilities ----------------------------------------------------------------------------------------------
  // Whose native queue a library call receives: "opencl", or the driver's name where the driver brings its own launcher.
  // Empty: no library calls.
  virtual std::string queue_api() const {
    return {};
  }
  // True where the host can read and write the device's memory in stream order: host callbacks may then take memory.
  virtual bool host_sees_memory() const {
    return false;
  }
  // True for devices without kernels whose streams execute in threads of their own: PyTorch's CPU kernels are then submitted to
  // the stream as host callbacks (fallback/deferred.h), not run by the calling thread.
  virtual bool defers_operators() const {
    return false;
  }

  // Memory and events that other processes can open (devices/interprocess.h); null: not offered.
  virtual Interprocess* interprocess() {
    return nullptr;
  }
  // A graph of the hardware's own; null: not offered for these commands. `commands` is valid during the call only.
  virtual std::unique_ptr<NativeGraph> instantiate(c10::ArrayRef<GraphCommand> commands);

  // --- profiles -------------------------------------------------------------------------------------------------------
  // Times the commands that the calling thread gives to the stream until CommandTimer::stop(). Commands that wait for a
  // kernel to be built are given to the driver first. Devices that cannot tell when a command ran record an event before and
  // one after it.
  virtual std::unique_ptr<CommandTimer> time_commands(StreamHandle stream);

  // Keeps the stream busy for about `milliseconds` (for tests and demonstrations, like torch.cuda._sleep).
  virtual void sleep(double milliseconds, StreamHandle stream);

 private:
  DeviceProperties properties_;
};

// Holds the GIL while it lives if the device's methods run Python; costs nothing otherwise. A device takes it for itself
// in each call; several calls in a row are cheaper inside one of these. Not to be taken while a lock of ours is held.
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

// Who gives a stream more than about so many commands that are not done waits until some are, as with CUDA's streams: each
// takes memory, and a program that waits for nothing gives them faster than they are done.
constexpr int64_t kMostWaiting = 1024;

// Gives the GIL up while it lives, if this thread has it: what it waits for may need Python.
class GilReleased {
 public:
  GilReleased();
  ~GilReleased();
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  void* saved_ = nullptr;
};

// --- the table of devices ----------------------------------------------------------------------------------------------
// Filled once, at first use, by the Python side (torch_backplane.drivers.discover), and never changed afterwards.

void add_device(std::unique_ptr<Device> device);
// The index that add_device() gives to the next one.
c10::DeviceIndex next_device_index() noexcept;
// Called by the Python side when discovery is over.
void finish_discovery();
// True once the devices are known. Starts nothing.
bool is_discovered() noexcept;
// The number of devices; discovers them if that has not happened. 0 on failure and in a forked child.
c10::DeviceIndex device_count() noexcept;
// Device `index` (-1: the current one). Throws for an index out of range, and after a fork.
Device& device(c10::DeviceIndex index);
// The index as given, or the current device's for -1; throws as `device` does.
c10::DeviceIndex checked_index(c10::DeviceIndex index);

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index); // checks the range
void set_current_device_unchecked(c10::DeviceIndex index) noexcept;
c10::DeviceIndex exchange_current_device(c10::DeviceIndex index);

// True in a child that was forked after the parent had initialized its devices.
bool in_bad_fork() noexcept;
void check_not_forked();

} // namespace backplane
