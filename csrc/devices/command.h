// One unit of work for a stream.
//
// A `Command` is a view: its arrays belong to the caller, who keeps them for the duration of the call that takes the command.
// `StoredCommand` owns a copy for whoever executes it later: a stream that waits for a kernel build, the queue of a host device,
// a captured graph. A plan (plans/plan.h) is a list of templates from which each replay makes commands.
#pragma once

#include <c10/util/ArrayRef.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace backplane {

class CompiledKernel;
class QueueFunction;

// A driver's queue, event and compiled kernel. Opaque: only the device that made one may look inside.
using StreamHandle = void*;
using EventHandle = void*;
using KernelHandle = void*;

// The kinds of transfer that a driver may treat differently.
enum class CopyKind : uint8_t { HostToDevice, DeviceToHost, WithinDevice };

// How a kernel is launched. Dimension 0 varies fastest; each global size is a multiple of the group size.
struct LaunchSpec {
  std::array<size_t, 3> global_size{1, 1, 1}; // work items
  std::array<size_t, 3> group_size{1, 1, 1};
  // Attributes, which not every device offers:
  size_t dynamic_shared_memory = 0; // bytes per group, in addition to what the kernel declares
  std::array<size_t, 3> cluster{1, 1, 1}; // groups per cluster
  bool cooperative = false; // all groups are resident at the same time, so that they may wait for each other

  bool has_attributes() const {
    return dynamic_shared_memory > 0 || cooperative || cluster != std::array<size_t, 3>{1, 1, 1};
  }
  bool operator==(const LaunchSpec&) const = default;
};

// `cluster`: of up to three dimensions. Throws ValueError where one is 0.
void set_attributes(LaunchSpec& spec, size_t dynamic_shared_memory, c10::ArrayRef<size_t> cluster, bool cooperative);
// The attributes in words, for errors, plans and graphs; empty without any.
std::string attributes_text(const LaunchSpec& spec);

// One argument, in the order of the parameters: device memory, or a number.
struct KernelArgument {
  const void* data; // the device address; of a number, where its bytes are
  uint32_t bytes; // of a number, in the kernel's own representation; 0 for memory
};

// A function that the host runs in stream order.
class HostFunction {
 public:
  virtual ~HostFunction() = default;
  // `memory`: where the host sees each piece of device memory; `numbers`: the bytes of each number, as store_number writes
  // them. What it throws is thrown by the stream's next synchronization.
  virtual void run(char* const* memory, const uint64_t* numbers) const = 0;
  virtual const std::string& name() const = 0;
  // Everything that the function does, in words: functions with the same text do the same.
  virtual std::string text() const {
    return name();
  }
  // An operator's CPU kernel on a host device: the submitting thread runs it if the stream is idle, as the CPU device would.
  // Other functions may block, and run in another thread.
  virtual bool is_operator() const {
    return false;
  }
};

std::shared_ptr<const HostFunction> make_host_function(
    std::string name, std::function<void(char* const* memory, const uint64_t* numbers)> function);

struct KernelLaunch {
  const CompiledKernel* kernel;
  LaunchSpec spec;
  c10::ArrayRef<KernelArgument> arguments;
};
// A function of a vendor's library that enqueues work itself (devices/queue_function.h).
struct LibraryCall {
  const QueueFunction* function;
  const std::string* caller; // the operator, for error messages
  c10::ArrayRef<KernelArgument> arguments;
};
// Host memory stays valid until the stream has passed the copy.
struct Copy {
  void* destination;
  const void* source;
  size_t bytes;
  CopyKind kind;
};
struct Fill {
  void* address;
  uint8_t value;
  size_t bytes;
};
struct HostCallback {
  std::shared_ptr<const HostFunction> function;
  c10::ArrayRef<char*> memory{}; // device addresses
  c10::ArrayRef<uint64_t> numbers{};
};
struct EventRecord {
  EventHandle event;
};
// The stream waits, not the host. Means the latest recording at the time of submission.
struct EventWait {
  EventHandle event;
};

using Command = std::variant<KernelLaunch, LibraryCall, Copy, Fill, HostCallback, EventRecord, EventWait>;

// A command without effect: a copy of no bytes, a launch of no work items.
bool is_empty(const Command& command);
// One word for messages: "launch", "library call", "copy", "fill", "host callback", "event record", "event wait".
const char* kind_of(const Command& command);
// What a profile and a graph show: the kernel's entry point, the library function, the host function.
std::string describe(const Command& command);

class StoredCommand {
 public:
  // `keep` lives as long as this: the event of a record, for example.
  explicit StoredCommand(const Command& command, std::shared_ptr<const void> keep = nullptr);
  StoredCommand(StoredCommand&&) = default;
  StoredCommand& operator=(StoredCommand&&) = default;

  const Command& command() const {
    return command_;
  }

 private:
  c10::ArrayRef<KernelArgument> keep_arguments(c10::ArrayRef<KernelArgument> arguments);

  Command command_; // its arrays are these:
  std::vector<KernelArgument> arguments_;
  std::vector<uint64_t> numbers_;
  std::vector<char*> memory_;
  std::unique_ptr<const std::string> caller_;
  std::shared_ptr<const void> owner_; // of the kernel or the library function
  std::shared_ptr<const void> keep_;
};

// Overloads as one function object for std::visit.
template <typename... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <typename... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

} // namespace backplane
