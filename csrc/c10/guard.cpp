// c10's device guard for bp: current device, streams and events.
#include <c10/core/ScalarType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

#include "c10/adopted_event.h"
#include "devices/device.h"
#include "memory/allocator.h"
#include "streams/capture.h"
#include "streams/stream.h"
#include "streams/sync_debug.h"

namespace backplane {
namespace {

Event* as_event(void* event) {
  return static_cast<Event*>(event);
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  static c10::Device bp(c10::DeviceIndex index) {
    return c10::Device(c10::kPrivateUse1, index);
  }

  c10::DeviceType type() const override {
    return c10::kPrivateUse1;
  }

  // --- devices
  c10::Device exchangeDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_privateuseone(), "expected a bp device, but got ", device);
    return bp(exchange_current_device(device.index()));
  }

  c10::Device getDevice() const override {
    return bp(current_device());
  }

  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_privateuseone(), "expected a bp device, but got ", device);
    set_current_device(device.index());
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device_unchecked(device.index());
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::DeviceCapability getDeviceCapability(c10::Device at) const override {
    // By name: c10 orders these bits differently from its dtypes.
    const auto& properties = device(at.index()).properties();
    c10::DeviceCapability capability;
#define BACKPLANE_SET(type, name)                                \
  capability.capability_data.supported_scalar_types.has_##name = \
      properties.supports(c10::ScalarType::name) && !c10::isQIntType(c10::ScalarType::name);
    AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS(BACKPLANE_SET)
#undef BACKPLANE_SET
    return capability;
  }

  void synchronizeDevice(const c10::DeviceIndex index) const override {
    synchronize_device(index);
  }

  // --- streams
  // Throws nothing for a device that does not exist: autograd asks for the stream of fake tensors, and must get one.
  c10::Stream getStream(c10::Device device) const override {
    if (C10_UNLIKELY(device.index() >= device_count())) {
      return c10::Stream(c10::Stream::DEFAULT, device);
    }
    return current_stream(device.index());
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(device.index());
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool isHighPriority) const override {
    return pool_stream(device.index(), isHighPriority ? kGreatestPriority : kLeastPriority);
  }

  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return pool_stream(device.index(), priority);
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_current_stream(stream);
  }

  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(native_handle(stream));
  }

  bool queryStream(const c10::Stream& stream) const override {
    return query_stream(stream);
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    note_synchronization();
    synchronize_stream(stream);
  }

  // Not declared with `override`, as torch 2.11 has no such method.
  bool isStreamCapturing(const c10::Stream& stream) const {
    return Capture::of(stream) != nullptr;
  }

  // --- events
  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex index, const c10::EventFlag flag) const override {
    TORCH_CHECK(
        index == -1 || index == stream.device_index(), "Event device ", static_cast<int>(index),
        " does not match recording stream's device ", static_cast<int>(stream.device_index()), ".");
    if (Event* adopted = AdoptedEvent::take(); C10_UNLIKELY(adopted != nullptr)) {
      destroy_event(std::exchange(*reinterpret_cast<Event**>(event), adopted));
      return;
    }
    *event = record_event(as_event(*event), stream, flag == c10::EventFlag::BACKEND_DEFAULT);
  }

  void block(void* event, const c10::Stream& stream) const override {
    block_stream(as_event(event), stream);
  }

  bool queryEvent(void* event) const override {
    return query_event(as_event(event));
  }

  void synchronizeEvent(void* event) const override {
    synchronize_event(as_event(event));
  }

  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return elapsed_ms(as_event(start), as_event(end));
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    destroy_event(as_event(event));
  }

  // --- memory
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    caching_allocator().recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

} // namespace
} // namespace backplane
