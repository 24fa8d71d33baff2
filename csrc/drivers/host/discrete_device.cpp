#include "drivers/host/discrete_device.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include "devices/address_space.h"
#include "devices/forwarding_device.h"

namespace backplane {
namespace {

DeviceProperties without_host_access(DeviceProperties properties) {
  properties.host_accessible = false;
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

  // --- transfers
  void copy(void* destination, const void* source, size_t bytes, CopyKind kind, StreamHandle stream) override {
    if (bytes == 0) {
      return;
    }
    void* to = kind == CopyKind::DeviceToHost ? destination : real(destination, bytes);
    const void* from = kind == CopyKind::HostToDevice ? source : real(source, bytes);
    inner_->copy(to, from, bytes, kind, stream);
  }

  void fill(void* address, uint8_t value, size_t bytes, StreamHandle stream) override {
    if (bytes > 0) {
      inner_->fill(real(address, bytes), value, bytes, stream);
    }
  }

  bool copy_from_peer(void* destination, Device& peer, const void* source, size_t bytes, StreamHandle stream) override {
    auto* other = dynamic_cast<DiscreteDevice*>(&peer);
    return other != nullptr &&
        inner_->copy_from_peer(
            real(destination, bytes), *other->inner_, other->real(source, bytes), bytes, stream);
  }

  bool can_access_peer(const Device& peer) const override {
    const auto* other = dynamic_cast<const DiscreteDevice*>(&peer);
    return other != nullptr && inner_->can_access_peer(*other->inner_);
  }

  void launch(
      KernelHandle kernel, const LaunchSize& size, c10::ArrayRef<KernelArgument> arguments,
      StreamHandle stream) override {
    inner_->launch(kernel, size, real(arguments), stream);
  }

  void call_on_queue(
      std::shared_ptr<const QueueFunction> function, const std::string& caller,
      c10::ArrayRef<KernelArgument> arguments, StreamHandle stream) override {
    inner_->call_on_queue(std::move(function), caller, real(arguments), stream);
  }

  bool host_sees_memory() const override {
    return false;
  }

  void call_host(HostFunction function, c10::ArrayRef<char*> memory, StreamHandle stream) override {
    TORCH_CHECK(memory.empty(), "the host does not see the memory of ", properties().name);
    inner_->call_host(std::move(function), {}, stream);
  }

 private:
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

  AddressSpace shadows_; // the address a tensor has → the memory it means
};

} // namespace

std::unique_ptr<Device> make_discrete(std::unique_ptr<Device> inner) {
  TORCH_CHECK(inner->properties().host_accessible, inner->properties().name, " has no host-accessible memory to hide");
  return std::make_unique<DiscreteDevice>(std::move(inner));
}

} // namespace backplane
