// A device that forwards every method that a subclass does not override to another device.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "devices/device.h"

namespace backplane {

class ForwardingDevice : public Device {
 public:
  // `inner` is a reference so that the caller can compute `properties` from it, in any order of evaluation.
  ForwardingDevice(DeviceProperties properties, std::unique_ptr<Device>&& inner)
      : Device(std::move(properties)), inner_(std::move(inner)) {}

  bool needs_gil() const override {
    return inner_->needs_gil();
  }

  bool is_lost() const noexcept override {
    return inner_->is_lost();
  }
  void check_not_lost() const override {
    inner_->check_not_lost();
  }

  void* allocate(size_t bytes) override {
    return inner_->allocate(bytes);
  }
  void free(void* address, size_t bytes) override {
    inner_->free(address, bytes);
  }
  std::pair<size_t, size_t> memory_info() override {
    return inner_->memory_info();
  }
  bool can_reserve() const override {
    return inner_->can_reserve();
  }
  void* reserve(size_t bytes) override {
    return inner_->reserve(bytes);
  }
  void unreserve(void* address, size_t bytes) override {
    inner_->unreserve(address, bytes);
  }
  bool map(void* address, size_t bytes) override {
    return inner_->map(address, bytes);
  }
  void unmap(void* address, size_t bytes) override {
    inner_->unmap(address, bytes);
  }
  bool can_pin() const override {
    return inner_->can_pin();
  }
  void* pin(void* memory, size_t bytes) override {
    return inner_->pin(memory, bytes);
  }
  void unpin(void* pinned) override {
    inner_->unpin(pinned);
  }

  StreamHandle create_stream(int priority) override {
    return inner_->create_stream(priority);
  }
  void destroy_stream(StreamHandle stream) noexcept override {
    inner_->destroy_stream(stream);
  }
  bool query_stream(StreamHandle stream) override {
    return inner_->query_stream(stream);
  }
  void synchronize_stream(StreamHandle stream) override {
    inner_->synchronize_stream(stream);
  }
  uintptr_t native_handle(StreamHandle stream) override {
    return inner_->native_handle(stream);
  }
  bool can_adopt_streams() const override {
    return inner_->can_adopt_streams();
  }
  StreamHandle adopt_stream(uintptr_t native) override {
    return inner_->adopt_stream(native);
  }

  EventHandle create_event(bool timing) override {
    return inner_->create_event(timing);
  }
  void destroy_event(EventHandle event) noexcept override {
    inner_->destroy_event(event);
  }
  bool query_event(EventHandle event) override {
    return inner_->query_event(event);
  }
  void synchronize_event(EventHandle event) override {
    inner_->synchronize_event(event);
  }
  double elapsed_ms(EventHandle start, EventHandle end) override {
    return inner_->elapsed_ms(start, end);
  }

  void submit(const Command& command, StreamHandle stream) override {
    inner_->submit(command, stream);
  }
  bool copy_from_peer(void* destination, Device& peer, const void* source, size_t bytes, StreamHandle stream) override {
    return inner_->copy_from_peer(destination, inside(peer), source, bytes, stream);
  }
  bool can_access_peer(const Device& peer) const override {
    return inner_->can_access_peer(inside(const_cast<Device&>(peer)));
  }
  bool wait_for_peer(Device& peer, EventHandle event, StreamHandle stream) override {
    return inner_->wait_for_peer(inside(peer), event, stream);
  }
  bool wait_for_signal(c10::intrusive_ptr<HostSignal> signal, StreamHandle stream) override {
    return inner_->wait_for_signal(std::move(signal), stream);
  }

  KernelHandle compile(KernelSource source) override {
    return inner_->compile(std::move(source));
  }
  KernelResources kernel_resources(KernelHandle kernel) override {
    return inner_->kernel_resources(kernel);
  }
  void destroy_kernel(KernelHandle kernel) noexcept override {
    inner_->destroy_kernel(kernel);
  }

  std::string queue_api() const override {
    return inner_->queue_api();
  }
  bool host_sees_memory() const override {
    return inner_->host_sees_memory();
  }
  bool defers_operators() const override {
    return inner_->defers_operators();
  }

  Interprocess* interprocess() override {
    return inner_->interprocess();
  }
  std::unique_ptr<NativeGraph> instantiate(c10::ArrayRef<GraphCommand> commands) override {
    return inner_->instantiate(commands);
  }

  std::unique_ptr<CommandTimer> time_commands(StreamHandle stream) override {
    return inner_->time_commands(stream);
  }

  void sleep(double milliseconds, StreamHandle stream) override {
    inner_->sleep(milliseconds, stream);
  }

 protected:
  // The device that `device` forwards to, if it is a ForwardingDevice; else `device`.
  static Device& inside(Device& device) {
    auto* forwarding = dynamic_cast<ForwardingDevice*>(&device);
    return forwarding != nullptr ? *forwarding->inner_ : device;
  }

  const std::unique_ptr<Device> inner_;
};

} // namespace backplane
