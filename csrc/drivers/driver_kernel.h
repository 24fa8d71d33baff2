// A kernel of a Python driver's device.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>

#include "drivers/driver_object.h"
#include "drivers/kernel_build.h"
#include "drivers/native_launcher.h"

namespace backplane {

class DriverKernel final : public KernelBuild {
 public:
  // `driver` lives as long as the process. The thread that does the build calls `finished` after it.
  DriverKernel(KernelSource source, DriverObject& driver, std::function<void()> finished);
  ~DriverKernel() override;

  // The entry point and the operator, for messages.
  std::string name() const;
  // The native handle; null without a native launcher. Requires is_built().
  void* native_handle() const {
    return native_handle_;
  }
  // Requires is_built(). With a native launcher, `queue` and the memory of the arguments are native handles, else the
  // driver's Python objects.
  void launch(void* queue, const LaunchSpec& size, c10::ArrayRef<LaunchArgument> arguments, uint64_t generation);
  // Requires is_built(). Calls the driver once and caches the result.
  KernelResources resources();
  // Requires is_built(). The most bytes of dynamic shared memory that a launch can have, if the driver says so.
  std::optional<int64_t> most_dynamic_shared_memory();
  bool is_binary() const {
    return source_.is_binary;
  }

 private:
  void build() override;
  void finished() noexcept override;
  void call_driver(void* stream, const LaunchSpec& size, c10::ArrayRef<LaunchArgument> arguments);

  const KernelSource source_;
  DriverObject& driver_;
  const std::function<void()> finished_;
  PyObject* object_ = nullptr; // what the driver's compile() or load() returned
  std::optional<KernelResources> resources_; // cached by resources(), with the next; protected by the GIL
  std::optional<int64_t> most_dynamic_shared_memory_;
  void* native_handle_ = nullptr;
  std::unique_ptr<NativeKernel> native_;
};

} // namespace backplane
