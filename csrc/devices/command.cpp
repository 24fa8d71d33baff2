#include "devices/command.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>

#include "devices/compiled_kernel.h"
#include "devices/queue_function.h"

namespace backplane {
namespace {

class NamedFunction final : public HostFunction {
 public:
  NamedFunction(std::string name, std::function<void(char* const*, const uint64_t*)> function)
      : name_(std::move(name)), function_(std::move(function)) {}

  void run(char* const* memory, const uint64_t* numbers) const override {
    function_(memory, numbers);
  }
  const std::string& name() const override {
    return name_;
  }

 private:
  const std::string name_;
  const std::function<void(char* const*, const uint64_t*)> function_;
};

} // namespace

std::shared_ptr<const HostFunction> make_host_function(
    std::string name, std::function<void(char* const*, const uint64_t*)> function) {
  return std::make_shared<NamedFunction>(std::move(name), std::move(function));
}

bool is_empty(const Command& command) {
  if (const auto* launch = std::get_if<KernelLaunch>(&command)) {
    const auto& [x, y, z] = launch->spec.global_size;
    return x == 0 || y == 0 || z == 0;
  }
  if (const auto* copy = std::get_if<Copy>(&command)) {
    return copy->bytes == 0;
  }
  const auto* fill = std::get_if<Fill>(&command);
  return fill != nullptr && fill->bytes == 0;
}

void set_attributes(LaunchSpec& spec, size_t dynamic_shared_memory, c10::ArrayRef<size_t> cluster, bool cooperative) {
  TORCH_CHECK_VALUE(
      cluster.size() <= 3 && std::find(cluster.begin(), cluster.end(), 0) == cluster.end(),
      "a cluster must have 1 to 3 dimensions of at least 1 group each, but got ", cluster);
  spec.dynamic_shared_memory = dynamic_shared_memory;
  std::copy(cluster.begin(), cluster.end(), spec.cluster.begin());
  spec.cooperative = cooperative;
}

std::string attributes_text(const LaunchSpec& spec) {
  std::string text;
  if (spec.dynamic_shared_memory > 0) {
    text += c10::str(", ", spec.dynamic_shared_memory, " bytes of dynamic shared memory");
  }
  if (const auto& [x, y, z] = spec.cluster; x * y * z > 1) {
    text += c10::str(", clusters of ", x, "×", y, "×", z, " groups");
  }
  return spec.cooperative ? text + ", cooperative" : text;
}

const char* kind_of(const Command& command) {
  static constexpr const char* kKinds[] = {"launch",        "library call", "copy",      "fill",
                                           "host callback", "event record", "event wait"};
  static_assert(std::size(kKinds) == std::variant_size_v<Command>);
  return kKinds[command.index()];
}

std::string describe(const Command& command) {
  return std::visit(
      Overloaded{
          [](const KernelLaunch& launch) {
            const auto& items = launch.spec.global_size;
            const auto& group = launch.spec.group_size;
            return c10::str(
                launch.kernel->entry(), "\\n", items[0], " × ", items[1], " × ", items[2], " work items in groups of ",
                group[0], " × ", group[1], " × ", group[2], attributes_text(launch.spec));
          },
          [](const LibraryCall& call) { return call.function->name(); },
          [](const Copy& copy) {
            return c10::str(
                "copy of ", copy.bytes, " bytes ",
                copy.kind == CopyKind::WithinDevice       ? "within the device"
                    : copy.kind == CopyKind::HostToDevice ? "from pinned memory"
                                                          : "to pinned memory");
          },
          [](const Fill& fill) { return c10::str("fill of ", fill.bytes, " bytes"); },
          [](const HostCallback& callback) { return c10::str("on the host: ", callback.function->text()); },
          [](const EventRecord&) { return std::string("event record"); },
          [](const EventWait&) { return std::string("event wait"); }},
      command);
}

StoredCommand::StoredCommand(const Command& command, std::shared_ptr<const void> keep)
    : command_(command), keep_(std::move(keep)) {
  if (auto* launch = std::get_if<KernelLaunch>(&command_)) {
    launch->arguments = keep_arguments(launch->arguments);
    owner_ = launch->kernel->weak_from_this().lock();
  } else if (auto* call = std::get_if<LibraryCall>(&command_)) {
    call->arguments = keep_arguments(call->arguments);
    caller_ = std::make_unique<const std::string>(*call->caller);
    call->caller = caller_.get();
    owner_ = call->function->shared_from_this();
  } else if (auto* callback = std::get_if<HostCallback>(&command_)) {
    memory_ = callback->memory.vec();
    numbers_ = callback->numbers.vec();
    callback->memory = memory_;
    callback->numbers = numbers_;
  }
}

c10::ArrayRef<KernelArgument> StoredCommand::keep_arguments(c10::ArrayRef<KernelArgument> arguments) {
  arguments_ = arguments.vec();
  size_t words = 0;
  const auto words_of = [](const KernelArgument& one) { return (one.bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t); };
  for (const KernelArgument& one : arguments_) {
    words += words_of(one);
  }
  numbers_.resize(words);
  uint64_t* next = numbers_.data();
  for (KernelArgument& one : arguments_) {
    if (one.bytes != 0) {
      std::memcpy(next, one.data, one.bytes);
      one.data = next;
      next += words_of(one);
    }
  }
  return arguments_;
}

} // namespace backplane
