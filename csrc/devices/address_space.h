// Addresses for memory that has none.
//
// PyTorch wants a pointer in every storage. A device whose memory is a handle (an OpenCL buffer, a Python object,
// whatever the CPU cannot dereference) gets a range of reserved, inaccessible address space for each segment: a data
// pointer is an address in it, and the device finds the handle and the offset again. Views, splitting and pointer
// arithmetic then work as for any other memory, and a stray read on the CPU faults instead of returning rubbish.
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

  // A new inaccessible range, page-aligned; throws when the process has no address space left.
  static void* reserve(size_t bytes);
  static void release(void* address, size_t bytes);

  // Binds [address, address + bytes) to `handle`. Ranges must not overlap.
  void insert(void* address, size_t bytes, void* handle);
  // Ends what insert() with this address began, and returns the handle.
  void* remove(void* address);
  // Where [address, address + bytes) lies. Throws, naming `owner`, unless one range holds all of it. Each thread
  // remembers where it found its last few, so that a kernel launch takes no lock and searches nothing.
  Place resolve(const void* address, size_t bytes, const char* owner) const;
  // Another number after each remove(): what was resolved before may be gone. No two address spaces share a number.
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
