#include "drivers/host/discrete_device.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include "devices/address_space.h"
#include "devices/forwarding_device.h"

namespace backplane {
namespace {

DeviceProperties without_host_access(DeviceProperties properties) {
  properties.addresses = Addresses::Synthetic;
  return properties;
}

class DiscreteDevice final : public ForwardingDevice {
 public:
  explicit DiscreteDevice(std::unique_ptr<Device> inner)
      : ForwardingDevice(without_host_access(inner->properties()), std::move(inner)) {}

  // --- memory
  void* allocate(size_t bytes) override {
    void* memory = inner_->allocate(bytes);
    try {
      return memory == nullptr ? nullptr : shadow(memory, bytes);
    } catch (const std::exception&) {
      inner_->free(memory, bytes);
      throw;
    }
  }

  void free(void* address, size_t bytes) override {
    inner_->free(unshadow(address, bytes), bytes);
  }

  void* reserve(size_t bytes) override {
    void* memory = inner_->reserve(bytes);
    try {
      return shadow(memory, bytes);
    } catch (const std::exception&) {
      inner_->unreserve(memory, bytes);
      throw;
    }
  }

  void unreserve(void* address, size_t bytes) override {
    inner_->unreserve(unshadow(address, bytes), bytes);
  }

  bool map(void* address, size_t bytes) override {
    return inner_->map(real(address, bytes), bytes);
  }

  void unmap(void* address, size_t bytes) override {
    inner_->unmap(real(address, bytes), bytes);
  }

  // --- commands
  void submit(const Command& command, StreamHandle stream) override {
    if (!is_empty(command)) {
      std::visit([&](const auto& one) { submit_real(one, stream); }, command);
    }
  }

  bool copy_from_peer(void* destination, Device& peer, const void* source, size_t bytes, StreamHandle stream) override {
    auto* other = dynamic_cast<DiscreteDevice*>(&peer);
    return other != nullptr &&
        inner_->copy_from_peer(real(destination, bytes), *other->inner_, other->real(source, bytes), bytes, stream);
  }

  bool can_access_peer(const Device& peer) const override {
    const auto* other = dynamic_cast<const DiscreteDevice*>(&peer);
    return other != nullptr && inner_->can_access_peer(*other->inner_);
  }

  // Not supported: they would need the addresses of `inner_`.
  Interprocess* interprocess() override {
    return nullptr;
  }
  std::unique_ptr<NativeGraph> instantiate(c10::ArrayRef<GraphCommand>) override {
    return nullptr;
  }

  bool host_sees_memory() const override {
    return false;
  }

 private:
  // Submits the command with real addresses.
  void submit_real(const KernelLaunch& launch, StreamHandle stream) {
    const auto arguments = real(launch.arguments);
    inner_->submit(KernelLaunch{launch.kernel, launch.spec, arguments}, stream);
  }
  void submit_real(const LibraryCall& call, StreamHandle stream) {
    const auto arguments = real(call.arguments);
    inner_->submit(LibraryCall{call.function, call.caller, arguments}, stream);
  }
  void submit_real(const Copy& copy, StreamHandle stream) {
    void* to = copy.kind == CopyKind::DeviceToHost ? copy.destination : real(copy.destination, copy.bytes);
    const void* from = copy.kind == CopyKind::HostToDevice ? copy.source : real(copy.source, copy.bytes);
    inner_->submit(Copy{to, from, copy.bytes, copy.kind}, stream);
  }
  void submit_real(const Fill& fill, StreamHandle stream) {
    inner_->submit(Fill{real(fill.address, fill.bytes), fill.value, fill.bytes}, stream);
  }
  void submit_real(const HostCallback& callback, StreamHandle stream) {
    TORCH_CHECK(callback.memory.empty(), "the host does not see the memory of ", properties().name);
    inner_->submit(callback, stream);
  }
  template <typename EventCommand>
  void submit_real(const EventCommand& command, StreamHandle stream) {
    inner_->submit(command, stream);
  }

  void* shadow(void* memory, size_t bytes) {
    void* address = AddressSpace::reserve(bytes);
    shadows_.insert(address, bytes, memory);
    return address;
  }

  void* unshadow(void* address, size_t bytes) {
    void* memory = shadows_.remove(address);
    AddressSpace::release(address, bytes);
    return memory;
  }

  char* real(const void* address, size_t bytes) const {
    const auto [memory, offset] = shadows_.resolve(address, bytes, properties().name.c_str());
    return static_cast<char*>(memory) + offset;
  }

  c10::SmallVector<KernelArgument, 24> real(c10::ArrayRef<KernelArgument> arguments) const {
    c10::SmallVector<KernelArgument, 24> found;
    for (const KernelArgument& argument : arguments) {
      const bool is_memory = argument.bytes == 0 && argument.data != nullptr;
      found.push_back({is_memory ? real(argument.data, 1) : argument.data, argument.bytes});
    }
    return found;
  }

  AddressSpace shadows_; // synthetic address → real memory
};

} // namespace

std::unique_ptr<Device> make_discrete(std::unique_ptr<Device> inner) {
  TORCH_CHECK(
      inner->properties().host_accessible(), inner->properties().name, " has no host-accessible memory to hide");
  return std::make_unique<DiscreteDevice>(std::move(inner));
}

} // namespace backplane
