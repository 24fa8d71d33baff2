// The arena, the devices' files, and the table of allocations.

#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernel_memory.h"
#include "modules.h"

extern "C" void emulator_forget(uint64_t begin, uint64_t bytes); // kernel_observer.h

namespace {

constexpr uint64_t kFileBytes = kArenaBytes;
constexpr uint64_t kPage = 4096;

char* reserve_addresses(uint64_t bytes, int protection) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* at = mmap(nullptr, bytes, protection, flags, -1, 0);
  if (at == MAP_FAILED) {
    perror("CUDA emulator: cannot reserve addresses");
    abort();
  }
  return static_cast<char*>(at);
}

char* aligned_arena() {
  char* at = reserve_addresses(kArenaBytes + kGranularity, PROT_NONE);
  return reinterpret_cast<char*>(rounded_up(reinterpret_cast<uint64_t>(at), kGranularity));
}

// Writes the byte of CUDA_EMULATOR_FILL to a part of a file.
void fill(int file, uint64_t offset, uint64_t bytes) {
  static const char* const setting = getenv("CUDA_EMULATOR_FILL");
  if (setting == nullptr) {
    return;
  }
  const std::vector<char> part(kGranularity, static_cast<char>(strtol(setting, nullptr, 0)));
  for (uint64_t done = 0; done < bytes; done += kGranularity) {
    const ssize_t written =
        pwrite(file, part.data(), std::min(kGranularity, bytes - done), static_cast<off_t>(offset + done));
    if (written < 0) {
      perror("CUDA emulator: cannot fill memory");
      abort();
    }
  }
}

} // namespace

uint64_t Ranges::take(uint64_t bytes) {
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    const auto [begin, size] = *at;
    if (size >= bytes) {
      free_.erase(at);
      if (size > bytes) {
        free_[begin + bytes] = size - bytes;
      }
      return begin;
    }
  }
  return 0;
}

void Ranges::give(uint64_t begin, uint64_t bytes) {
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && begin + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      before->second += bytes;
      return;
    }
  }
  free_[begin] = bytes;
}

Memory& Memory::the() {
  static Memory& memory = *new Memory;
  return memory;
}

Memory::Memory()
    : arena_(aligned_arena()),
      owners_(reinterpret_cast<uint8_t*>(reserve_addresses(kArenaBytes >> kOwnerShift, PROT_READ | PROT_WRITE))),
      addresses_(reinterpret_cast<uint64_t>(arena_), kArenaBytes) {
  for (int& file : files_) {
    file = memfd_create("emulated CUDA device", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kFileBytes) != 0) {
      perror("CUDA emulator: cannot create a file in memory");
      abort();
    }
    offsets_.emplace_back(kGranularity, kFileBytes - kGranularity); // 0 is not a valid offset
  }
}

int Memory::file(const Device* device) {
  return files_[device->ordinal];
}

std::shared_ptr<Physical> Memory::create(Device* device, uint64_t bytes) {
  size_t used = device->used;
  do {
    if (bytes > device->memory - used) {
      return nullptr;
    }
  } while (!device->used.compare_exchange_weak(used, used + bytes));
  uint64_t offset = 0;
  {
    std::lock_guard lock(own_);
    offset = offsets_[static_cast<size_t>(device->ordinal)].take(rounded_up(bytes, kGranularity));
  }
  if (offset == 0) {
    device->used -= bytes;
    return nullptr;
  }
  fill(file(device), offset, bytes);
  return std::make_shared<Physical>(device, bytes, offset);
}

Physical::~Physical() {
  Memory& memory = Memory::the();
  const uint64_t whole = rounded_up(bytes, kGranularity);
  fallocate(
      memory.file(device), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
      static_cast<off_t>(whole));
  std::lock_guard lock(memory.own_);
  memory.offsets_[static_cast<size_t>(device->ordinal)].give(offset, whole);
  device->used -= bytes;
}

uint64_t Memory::reserve(uint64_t bytes) {
  std::lock_guard lock(own_);
  uint64_t begin = addresses_.take(rounded_up(bytes, kGranularity) + kGranularity);
  while (begin == 0 && !retired_.empty()) {
    reuse_oldest();
    begin = addresses_.take(rounded_up(bytes, kGranularity) + kGranularity);
  }
  return begin;
}

void Memory::unreserve(uint64_t begin, uint64_t bytes) {
  constexpr size_t kMostRetired = 1024;
  std::lock_guard lock(own_);
  retired_.emplace_back(begin, bytes);
  if (retired_.size() > kMostRetired) {
    reuse_oldest();
  }
}

void Memory::reuse_oldest() {
  const auto [begin, bytes] = retired_.front();
  retired_.pop_front();
  addresses_.give(begin, rounded_up(bytes, kGranularity) + kGranularity);
}

bool Memory::map(uint64_t begin, uint64_t bytes, int file, uint64_t offset, uint8_t owner) {
  const int protection = PROT_READ | PROT_WRITE;
  void* at = mmap(
      reinterpret_cast<void*>(begin), rounded_up(bytes, kPage), protection, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
      file, static_cast<off_t>(offset));
  if (at == MAP_FAILED) {
    return false;
  }
  set_owner(begin, bytes, owner);
  return true;
}

bool Memory::map_host(uint64_t begin, uint64_t bytes) {
  if (mprotect(reinterpret_cast<void*>(begin), rounded_up(bytes, kPage), PROT_READ | PROT_WRITE) != 0) {
    return false;
  }
  set_owner(begin, bytes, kHostOwner);
  return true;
}

void Memory::unmap(uint64_t begin, uint64_t bytes) {
  set_owner(begin, bytes, 0);
  mmap(
      reinterpret_cast<void*>(begin), rounded_up(bytes, kPage), PROT_NONE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (checks_kernels()) {
    emulator_forget(begin, bytes);
  }
}

void Memory::set_owner(uint64_t begin, uint64_t bytes, uint8_t owner) {
  const uint64_t first = (begin - reinterpret_cast<uint64_t>(arena_)) >> kOwnerShift;
  memset(owners_ + first, owner, (bytes + (1 << kOwnerShift) - 1) >> kOwnerShift);
}

void Memory::add(const Allocation& allocation) {
  std::lock_guard lock(own_);
  Allocation& added = allocations_[allocation.begin] = allocation;
  added.id = ++last_id_;
}

bool Memory::remove(uint64_t begin, MemoryKind kind, Allocation* removed) {
  std::lock_guard lock(own_);
  const auto at = allocations_.find(begin);
  if (at == allocations_.end() || at->second.kind != kind) {
    return false;
  }
  *removed = at->second;
  allocations_.erase(at);
  return true;
}

bool Memory::find(uint64_t address, Allocation* found) {
  std::lock_guard lock(own_);
  auto at = allocations_.upper_bound(address);
  if (at == allocations_.begin()) {
    return false;
  }
  *found = (--at)->second;
  return address - found->begin < found->bytes;
}

std::vector<Allocation> Memory::of(const Context& context) {
  std::lock_guard lock(own_);
  std::vector<Allocation> all;
  for (const auto& [begin, one] : allocations_) {
    if (one.context.lock().get() == &context) {
      all.push_back(one);
    }
  }
  return all;
}

bool Memory::is_known(uint64_t begin, uint64_t bytes) {
  if (bytes == 0) {
    return true;
  }
  const uint64_t offset = begin - reinterpret_cast<uint64_t>(arena_);
  if (offset < kArenaBytes) {
    const uint64_t first = offset >> kOwnerShift, last = (offset + bytes - 1) >> kOwnerShift;
    return bytes <= kArenaBytes - offset && memchr(owners_ + first, 0, last - first + 1) == nullptr;
  }
  Allocation found;
  return is_module_memory(begin, bytes) || (find(begin, &found) && begin + bytes <= found.begin + found.bytes);
}

std::vector<std::pair<uint64_t, uint64_t>> Memory::registered() {
  std::lock_guard lock(own_);
  std::vector<std::pair<uint64_t, uint64_t>> all;
  for (const auto& [begin, one] : allocations_) {
    if (one.kind == MemoryKind::kRegistered) {
      all.emplace_back(begin, begin + one.bytes);
    }
  }
  return all;
}

std::vector<std::pair<uint64_t, uint64_t>> Memory::ranges() {
  std::lock_guard lock(own_);
  std::vector<std::pair<uint64_t, uint64_t>> all;
  for (const auto& [begin, one] : allocations_) {
    all.emplace_back(begin, begin + one.bytes);
  }
  return all;
}

std::vector<std::pair<uint64_t, uint64_t>> Memory::retired() {
  std::lock_guard lock(own_);
  std::vector<std::pair<uint64_t, uint64_t>> all;
  for (const auto& [begin, bytes] : retired_) {
    all.emplace_back(begin, begin + bytes);
  }
  return all;
}
