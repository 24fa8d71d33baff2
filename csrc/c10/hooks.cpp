// ATen's hooks for an accelerator. Registers them and the allocator of pinned memory.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "c10/generator.h"
#include "c10/storage.h"
#include "devices/device.h"
#include "devices/discovery.h"
#include "memory/allocator.h"
#include "memory/pinned.h"

namespace backplane {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {
    ensure_initialized();
  }

  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return device_count() > 0;
  }

  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    // The first use of any device initializes all of them.
    return is_initialized() && !in_bad_fork() && index >= 0 && index < device_count();
  }

  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }

  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_current_device(index);
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return exchange_current_device(index);
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchange_current_device(index);
  }

  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }

  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }

  at::Device getDeviceFromPtr(void* data) const override {
    const auto index = device_of_address(data);
    TORCH_CHECK(index >= 0, "the address ", data, " does not belong to a bp device");
    return at::Device(at::kPrivateUse1, index);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }

  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<PhiloxGenerator>(checked_index(index));
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

struct Registration {
  Registration() {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    at::setHostAllocator(at::kPrivateUse1, &pinned_allocator());
  }
} registration;

} // namespace
} // namespace backplane
