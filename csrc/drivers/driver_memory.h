// The memory of a device that a Python driver brought: its segments, and where they are.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <utility>

#include "devices/address_space.h"
#include "devices/device.h"
#include "drivers/driver_object.h"
#include "drivers/native_launcher.h"

namespace backplane {

// Of each handle that the driver gives for a segment, a Python object, one reference is kept.
class DriverMemory {
 public:
  // Both live as long as this. The caller has the GIL.
  DriverMemory(DriverObject& driver, const DeviceProperties& properties);

  // As Device::allocate and Device::memory_info.
  void* allocate(size_t bytes);
  std::pair<size_t, size_t> info();
  // As Device::free, of memory that no work uses. The caller has the GIL.
  void free(void* address, size_t bytes);

  // As the methods of Device; what is given back no work uses, and the caller has the GIL.
  bool can_reserve() const noexcept {
    return can_reserve_;
  }
  void* reserve(size_t bytes);
  void unreserve(void* address, size_t bytes);
  bool map(void* address, size_t bytes);
  void unmap(void* address, size_t bytes);

  // Binds a segment of another process, which the launcher calls `native`, to an address. The driver's methods in Python get it
  // as an integer. Its bytes do not count as allocated. The caller has the GIL.
  void* insert_imported(void* native, size_t bytes);
  // Undoes that, and returns `native`. The caller has the GIL.
  void* remove_imported(void* address, size_t bytes);
  struct Exported {
    void* native;
    size_t bytes;
    size_t offset;
  };
  // The segment that [address, address + bytes) lies in.
  Exported segment_of(const void* address, size_t bytes) const;

  struct Place {
    pybind11::handle segment; // what the driver calls it
    size_t offset; // bytes from its start
  };
  // Where [address, address + bytes) lies; throws unless one segment holds all of it.
  Place place_of(const void* address, size_t bytes) const;
  // An argument as launches take it: memory becomes a handle of the hardware API's, without a native launcher of the
  // driver's; with one on a device with pointers, the pointer and offset 0.
  LaunchArgument resolve(const KernelArgument& argument) const;
  // Another number when what was resolved before may be gone.
  uint64_t generation() const noexcept {
    return segments_.generation();
  }

 private:
  // True where the launcher takes addresses as they are.
  bool has_pointers() const noexcept {
    return properties_.addresses == Addresses::Device && driver_.launcher() != nullptr;
  }
  bool take(size_t bytes);
  void* new_segment(const char* method, const char* doing, size_t bytes);
  void* place(const pybind11::object& handle, size_t bytes, const char* give_back);
  void end_segment(const char* method, void* address, size_t bytes);
  void* address_of(const pybind11::object& handle, size_t bytes) const;

  DriverObject& driver_;
  const DeviceProperties& properties_;
  AddressSpace segments_; // where each Segment is
  std::atomic<size_t> allocated_{0}; // bytes
  const bool can_reserve_;
  const size_t largest_; // bytes of a segment
};

} // namespace backplane
