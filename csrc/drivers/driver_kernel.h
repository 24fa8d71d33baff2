// A kernel of a device that a Python driver brought.
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
  // `driver` lives as long as the process. `finished` is called by the thread that did the build.
  DriverKernel(KernelSource source, DriverObject& driver, std::function<void()> finished);
  ~DriverKernel() override;

  // Its entry and operator, for messages.
  std::string name() const;
  // What the native launcher's API calls it; null without a launcher. Only when it is built.
  void* native_handle() const {
    return native_handle_;
  }
  // Only when it is built. `queue` is the native queue where there is a native launcher, else the driver's object for the
  // stream; the memory of arguments accordingly.
  void launch(void* queue, const LaunchSpec& size, c10::ArrayRef<LaunchArgument> arguments, uint64_t generation);
  // Only when it is built. Asks the driver once.
  KernelResources resources();

 private:
  void build() override;
  void finished() noexcept override;
  void call_driver(void* stream, const LaunchSpec& size, c10::ArrayRef<LaunchArgument> arguments);

  const KernelSource source_;
  DriverObject& driver_;
  const std::function<void()> finished_;
  PyObject* object_ = nullptr; // what the driver's compile() or load() returned
  std::optional<KernelResources> resources_; // under the GIL, once they were asked for
  void* native_handle_ = nullptr;
  std::unique_ptr<NativeKernel> native_;
};

} // namespace backplane
