// Commands: the units of work of a stream.
//
// A `Command` is a view: the caller owns its arrays and keeps them alive during the call that takes the command.
// `StoredCommand` owns a copy for later execution: by a stream that waits for a kernel build, the queue of a host
// device, or a captured graph. A plan (plans/plan.h) is a list of templates from which each replay makes commands.
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

// A driver's queue, event and compiled kernel. Opaque to all but the device that created them.
using StreamHandle = void*;
using EventHandle = void*;
using KernelHandle = void*;

// The kinds of transfer that a driver may treat differently.
enum class CopyKind : uint8_t { HostToDevice, DeviceToHost, WithinDevice };

// How a kernel is launched. Dimension 0 varies fastest; each global size is a multiple of the group size.
struct LaunchSpec {
  std::array<size_t, 3> global_size{1, 1, 1}; // work items
  std::array<size_t, 3> group_size{1, 1, 1};
  // Attributes that not every device supports:
  size_t dynamic_shared_memory = 0; // bytes per group, in addition to what the kernel declares
  std::array<size_t, 3> cluster{1, 1, 1}; // groups per cluster
  bool cooperative = false; // all groups are resident at the same time, so that they can wait for each other

  bool has_attributes() const {
    return dynamic_shared_memory > 0 || cooperative || cluster != std::array<size_t, 3>{1, 1, 1};
  }
  bool operator==(const LaunchSpec&) const = default;
};

// `cluster`: up to three dimensions. Throws ValueError if there are more, or if one is 0.
void set_attributes(LaunchSpec& spec, size_t dynamic_shared_memory, c10::ArrayRef<size_t> cluster, bool cooperative);
// A description of the attributes for errors, plans and graphs; empty if there are none.
std::string attributes_text(const LaunchSpec& spec);

// One argument, in the order of the parameters: device memory, or a number.
struct KernelArgument {
  const void* data; // memory: its device address; number: where its bytes are
  uint32_t bytes; // memory: 0; number: its size in the kernel's representation
};

// A function that the host runs in stream order.
class HostFunction {
 public:
  virtual ~HostFunction() = default;
  // `memory`: host pointers to the command's device memory; `numbers`: the bytes of each number, as store_number writes
  // them. The stream's next synchronization rethrows its exceptions.
  virtual void run(char* const* memory, const uint64_t* numbers) const = 0;
  virtual const std::string& name() const = 0;
  // Identifies what the function does: functions with the same text do the same.
  virtual std::string text() const {
    return name();
  }
  // True for the CPU kernel of an operator on a host device. The submitting thread runs it if the stream is idle, like
  // the CPU device. Other functions can block, so another thread runs them.
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
// A library function that submits work to the queue itself (devices/queue_function.h).
struct LibraryCall {
  const QueueFunction* function;
  const std::string* caller; // the operator, for error messages
  c10::ArrayRef<KernelArgument> arguments;
};
// Host memory must stay valid until the copy has completed.
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
// The stream waits, not the host. Refers to the latest recording at the time of submission.
struct EventWait {
  EventHandle event;
};

using Command = std::variant<KernelLaunch, LibraryCall, Copy, Fill, HostCallback, EventRecord, EventWait>;

// True for a command without effect: a copy or fill of 0 bytes, a launch of 0 work items.
bool is_empty(const Command& command);
// The kind, for messages: "launch", "library call", "copy", "fill", "host callback", "event record", "event wait".
const char* kind_of(const Command& command);
// A description for graph dumps, with the name of the kernel, library function or host function.
std::string describe(const Command& command);

class StoredCommand {
 public:
  // Keeps `keep` alive, for example the event of a record.
  explicit StoredCommand(const Command& command, std::shared_ptr<const void> keep = nullptr);
  StoredCommand(StoredCommand&&) = default;
  StoredCommand& operator=(StoredCommand&&) = default;

  const Command& command() const {
    return command_;
  }

 private:
  c10::ArrayRef<KernelArgument> keep_arguments(c10::ArrayRef<KernelArgument> arguments);

  Command command_; // its arrays are the members below
  std::vector<KernelArgument> arguments_;
  std::vector<uint64_t> numbers_;
  std::vector<char*> memory_;
  std::unique_ptr<const std::string> caller_;
  std::shared_ptr<const void> owner_; // keeps the kernel or library function alive
  std::shared_ptr<const void> keep_;
};

// Combines functions into one overloaded function object for std::visit.
template <typename... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <typename... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

} // namespace backplane
