// Device memory: parts of a file in memory per device, mapped into one range of addresses, the arena.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "contexts.h"
#include "cuda_api.h"

constexpr uint64_t kGranularity = 2 << 20; // of addresses, and of mappings
constexpr uint64_t kArenaBytes = uint64_t{1} << 39;
constexpr int kOwnerShift = 9; // `owners` has a byte for 512 bytes of the arena
constexpr uint8_t kHostOwner = 1 << kMostDevices; // pinned memory

// Free parts of a range.
class Ranges {
 public:
  Ranges(uint64_t begin, uint64_t bytes) {
    free_[begin] = bytes;
  }
  // Returns the first part with that many bytes; 0 if there is none.
  uint64_t take(uint64_t bytes);
  void give(uint64_t begin, uint64_t bytes);

 private:
  std::map<uint64_t, uint64_t> free_;
};

enum class MemoryKind { kDevice, kHost, kRegistered, kMapped, kImported };

struct Allocation {
  uint64_t begin;
  uint64_t bytes; // as requested
  MemoryKind kind;
  Device* device; // null for memory of the host
  std::weak_ptr<Context> context; // in which it was allocated
  uint64_t offset; // in the device's file
  unsigned flags; // of host memory
  uint64_t id; // unique in the process
};

// Memory of a device without an address.
struct Physical {
  Physical(Device* of, uint64_t size, uint64_t at) : device(of), bytes(size), offset(at) {}
  ~Physical();

  Device* device;
  uint64_t bytes, offset;
};

class Memory {
 public:
  static Memory& the();

  char* arena() const {
    return arena_;
  }
  uint8_t* owners() const {
    return owners_;
  }
  int file(const Device* device);

  // Returns null if the device has not that much memory.
  std::shared_ptr<Physical> create(Device* device, uint64_t bytes);

  // Addresses. Multiples of kGranularity, each with an inaccessible page behind it; 0 if there are none.
  uint64_t reserve(uint64_t bytes);
  void unreserve(uint64_t begin, uint64_t bytes); // those of reserve()

  // Maps a part of a file at an address. `owner`: bits of the devices that can access it.
  bool map(uint64_t begin, uint64_t bytes, int file, uint64_t offset, uint8_t owner);
  bool map_host(uint64_t begin, uint64_t bytes);
  void unmap(uint64_t begin, uint64_t bytes);
  void set_owner(uint64_t begin, uint64_t bytes, uint8_t owner);

  void add(const Allocation& allocation);
  // Removes the allocation that begins at an address. Returns false if there is none of this kind.
  bool remove(uint64_t begin, MemoryKind kind, Allocation* removed);
  // Finds the allocation that contains an address.
  bool find(uint64_t address, Allocation* found);
  std::vector<Allocation> of(const Context& context);

  // Whether a copy can use a range as memory of a device, or as memory of the host that is pinned.
  bool is_known(uint64_t begin, uint64_t bytes);
  bool is_in_arena(uint64_t address) const {
    return address - reinterpret_cast<uint64_t>(arena_) < kArenaBytes;
  }

  // All memory, (begin, end), by address.
  std::vector<std::pair<uint64_t, uint64_t>> ranges();

  // Freed memory whose addresses are not used again yet, (begin, end).
  std::vector<std::pair<uint64_t, uint64_t>> retired();

  // Registered host memory, (begin, end), for kernels.
  std::vector<std::pair<uint64_t, uint64_t>> registered();

  std::mutex mutex; // for calls that do several of these

 private:
  Memory();
  void reuse_oldest();

  char* arena_;
  uint8_t* owners_;
  int files_[kMostDevices];
  std::mutex own_;
  Ranges addresses_;
  // Freed addresses, the oldest ones first: begin, bytes. They are used again late, so that kernels that still use them
  // fail.
  std::deque<std::pair<uint64_t, uint64_t>> retired_;
  std::vector<Ranges> offsets_;
  std::map<uint64_t, Allocation> allocations_;
  uint64_t last_id_ = 0;

  friend struct Physical;
};

// Frees the memory that was allocated in a context.
void free_memory_of(const Context& context);

inline uint64_t rounded_up(uint64_t bytes, uint64_t to) {
  return (bytes + to - 1) / to * to;
}
