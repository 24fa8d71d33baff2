// Synthetic addresses for memory that is an opaque handle, such as an OpenCL buffer or a Python object.
//
// PyTorch needs a pointer in every storage. On devices with such memory, each segment gets a range of reserved,
// inaccessible address space. A data pointer is an address in that range, which the device maps back to the handle and
// an offset. Views, splitting and pointer arithmetic work as for any other memory, and a stray read on the CPU faults
// instead of returning garbage.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <shared_mutex>

namespace backplane {

class AddressSpace {
 public:
  struct Place {
    void* handle;
    size_t offset; // bytes from the handle's start
  };

  // Reserves an inaccessible, page-aligned range. Throws if the process has no address space left.
  static void* reserve(size_t bytes);
  static void release(void* address, size_t bytes);

  // Binds [address, address + bytes) to `handle`. Ranges must not overlap.
  void insert(void* address, size_t bytes, void* handle);
  // Removes the range that insert() bound to this address, and returns its handle.
  void* remove(void* address);
  // The handle and offset of [address, address + bytes). Throws an error that names `owner` unless one range contains
  // all of it. Each thread caches its last few ranges, so that a typical kernel launch takes no lock and does no
  // search.
  Place resolve(const void* address, size_t bytes, const char* owner) const;
  // Changes with each remove(), since earlier results can be stale then. No two address spaces share a number.
  uint64_t generation() const noexcept {
    return generation_.load(std::memory_order_acquire);
  }

 private:
  Place search(const char* first, size_t bytes, const char* owner) const;
  static uint64_t next_generation() noexcept;

  struct Range {
    size_t bytes;
    void* handle;
  };

  mutable std::shared_mutex lock_; // never held while a device is called
  std::map<const char*, Range> ranges_;
  std::atomic<uint64_t> generation_{next_generation()}; // written under the lock
};

} // namespace backplane
