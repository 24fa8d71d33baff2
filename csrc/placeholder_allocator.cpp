// Stands in until the caching allocator lands: every allocation goes to the device.
#include <mutex>
#include <map>
#include <pybind11/pybind11.h>

#include "allocator.h"
#include "bindings.h"
#include "device.h"

namespace backplane {
namespace {

struct Plain final : c10::DeviceAllocator {
  static std::map<void*, std::pair<c10::DeviceIndex, size_t>>& blocks() {
    static auto* all = new std::map<void*, std::pair<c10::DeviceIndex, size_t>>;
    return *all;
  }
  static std::mutex& lock() {
    static auto* one = new std::mutex;
    return *one;
  }
  static void release(void* address) {
    if (address == nullptr) {
      return;
    }
    std::pair<c10::DeviceIndex, size_t> block;
    {
      std::lock_guard<std::mutex> guard(lock());
      block = blocks().at(address);
      blocks().erase(address);
    }
    device(block.first).free(address, block.second);
  }
  c10::DataPtr allocate_for(c10::DeviceIndex index, size_t bytes) {
    void* address = nullptr;
    index = checked_index(index);
    if (bytes > 0) {
      address = device(index).allocate(bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "bp out of memory");
      std::lock_guard<std::mutex> guard(lock());
      blocks()[address] = {index, bytes};
    }
    return {address, address, &release, c10::Device(c10::kPrivateUse1, index)};
  }
  c10::DataPtr allocate(size_t bytes) override {
    return allocate_for(current_device(), bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    return {};
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

Plain plain;
struct Registration {
  Registration() {
    c10::SetAllocator(c10::kPrivateUse1, &plain);
  }
} registration;

} // namespace

c10::DeviceAllocator& caching_allocator() {
  return plain;
}

c10::DataPtr allocate_on(c10::DeviceIndex index, size_t bytes) {
  return plain.allocate_for(index, bytes);
}

c10::DeviceIndex device_of_address(const void* address) {
  std::lock_guard<std::mutex> guard(Plain::lock());
  auto after = Plain::blocks().upper_bound(const_cast<void*>(address));
  if (after == Plain::blocks().begin()) {
    return -1;
  }
  --after;
  return address < static_cast<char*>(after->first) + after->second.second ? after->second.first : -1;
}

void bind_allocator(pybind11::module_&) {}

} // namespace backplane
