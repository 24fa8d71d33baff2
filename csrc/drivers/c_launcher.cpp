#include "drivers/c_launcher.h"

#include <c10/util/Exception.h>

namespace backplane {
namespace {

// As docs/write-a-driver.md declares them: `queue`, `kernel` and `memory` are what the driver's native_… methods gave,
// and what is answered is 0, or a status that the driver's native_error() makes an exception of.
using Launch = int (*)(
    void* queue, void* kernel, const uint64_t* items, const uint64_t* group, const CArgument* arguments, uint64_t count);
using Copy = int (*)(
    void* queue, void* to, uint64_t to_offset, void* from, uint64_t from_offset, uint64_t bytes);
using Fill = int (*)(void* queue, void* memory, uint64_t offset, uint64_t bytes, int value);
using Flush = int (*)(void* queue);

struct Functions {
  Launch launch;
  Copy copy;
  Fill fill;
  Flush flush;
};

void check(const char* call, int status) {
  if (C10_UNLIKELY(status != 0)) {
    throw NativeError{call, status, ""};
  }
}

class CKernel final : public NativeKernel {
 public:
  CKernel(Launch launch, void* kernel) : launch_(launch), kernel_(kernel) {}

  void launch(
      void* queue, const LaunchSize& size, c10::ArrayRef<LaunchArgument> arguments, uint64_t /*generation*/) override {
    const auto given = c_arguments(arguments);
    uint64_t items[3];
    uint64_t group[3];
    for (size_t i = 0; i < 3; ++i) {
      items[i] = size.items[i];
      group[i] = size.group[i];
    }
    check("launch", launch_(queue, kernel_, items, group, given.data(), given.size()));
  }

 private:
  const Launch launch_;
  void* const kernel_;
};

class CLauncher final : public NativeLauncher {
 public:
  explicit CLauncher(const Functions& functions) : functions_(functions) {}

  const char* api() const override {
    return "c";
  }

  std::unique_ptr<NativeKernel> kernel(void* kernel, const std::string& /*text*/) const override {
    return std::make_unique<CKernel>(functions_.launch, kernel);
  }

  void copy(
      void* queue, const LaunchArgument& destination, const LaunchArgument& source, size_t bytes) const override {
    check(
        "copy",
        functions_.copy(queue, destination.memory, destination.offset, source.memory, source.offset, bytes));
  }

  void fill(void* queue, const LaunchArgument& memory, uint8_t value, size_t bytes) const override {
    check("fill", functions_.fill(queue, memory.memory, memory.offset, bytes, value));
  }

  void flush(void* queue) const override {
    check("flush", functions_.flush(queue));
  }

  void call_host(void*, Device::HostFunction, c10::ArrayRef<LaunchArgument>, uint64_t) const override {
    TORCH_CHECK(false, "a launcher in C calls no functions of the host");
  }

 private:
  const Functions functions_;
};

} // namespace

std::unique_ptr<NativeLauncher> make_c_launcher(const std::map<std::string, uintptr_t>& functions) {
  const auto find = [&](const char* name) { return function_of(functions, "c", name); };
  return std::make_unique<CLauncher>(Functions{
      reinterpret_cast<Launch>(find("launch")), reinterpret_cast<Copy>(find("copy")),
      reinterpret_cast<Fill>(find("fill")), reinterpret_cast<Flush>(find("flush"))});
}

} // namespace backplane
