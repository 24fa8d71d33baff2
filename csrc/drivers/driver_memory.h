// The memory of a Python driver's device: its segments and their addresses.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <utility>

#include "devices/address_space.h"
#include "devices/device.h"
#include "drivers/driver_object.h"
#include "drivers/native_launcher.h"

namespace backplane {

// Holds a reference to the driver's Python object of each segment.
class DriverMemory {
 public:
  // The arguments must outlive this object. The caller holds the GIL.
  DriverMemory(DriverObject& driver, const DeviceProperties& properties);

  // Like Device::allocate and Device::memory_info.
  void* allocate(size_t bytes);
  std::pair<size_t, size_t> info();
  // Like Device::free. No pending work uses the memory. The caller holds the GIL.
  void free(void* address, size_t bytes);

  // Like the methods of Device. No pending work uses memory that is unmapped or unreserved. The caller holds the GIL.
  bool can_reserve() const noexcept {
    return can_reserve_;
  }
  void* reserve(size_t bytes);
  void unreserve(void* address, size_t bytes);
  bool map(void* address, size_t bytes);
  void unmap(void* address, size_t bytes);

  // Binds an imported segment of another process to an address. `native` is its native handle; the driver's Python
  // methods receive it as an integer. The segment does not count as allocated. The caller holds the GIL.
  void* insert_imported(void* native, size_t bytes);
  // Undoes insert_imported() and returns `native`. The caller holds the GIL.
  void* remove_imported(void* address, size_t bytes);
  struct Exported {
    void* native;
    size_t bytes;
    size_t offset;
  };
  // The segment that contains [address, address + bytes).
  Exported segment_of(const void* address, size_t bytes) const;

  struct Place {
    pybind11::handle segment; // the driver's object
    size_t offset; // bytes from the start of the segment
  };
  // The location of [address, address + bytes). Throws if it is not contained in one segment.
  Place place_of(const void* address, size_t bytes) const;
  // Converts an argument for a launch. Memory becomes a segment and an offset. With a native launcher, the segment is
  // its native handle, else the driver's object. If the launcher takes pointers: the pointer and offset 0.
  LaunchArgument resolve(const KernelArgument& argument) const;
  // Changes when earlier results of resolve() can be invalid.
  uint64_t generation() const noexcept {
    return segments_.generation();
  }

 private:
  // True if the launcher takes addresses as they are.
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
  AddressSpace segments_; // maps addresses to Segments
  std::atomic<size_t> allocated_{0}; // bytes
  const bool can_reserve_;
};

} // namespace backplane
