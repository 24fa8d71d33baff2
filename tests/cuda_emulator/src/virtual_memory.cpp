// Virtual memory management: address ranges, memory without addresses, and mappings between them.

#include <algorithm>
#include <map>

#include "entry.h"
#include "memory.h"

namespace {

struct Mapping {
  uint64_t bytes;
  std::shared_ptr<Physical> memory;
};

struct Handle {
  std::shared_ptr<Physical> memory;
  CUmemAllocationProp properties;
  unsigned references;
};

// Protected by Memory::mutex.
struct State {
  std::map<uint64_t, uint64_t> ranges; // reserved: begin, bytes
  std::map<uint64_t, Mapping> mappings;
  std::map<CUmemGenericAllocationHandle, Handle> handles;
};

State& state() {
  static State& all = *new State;
  return all;
}

bool is_aligned(uint64_t bytes) {
  return bytes % kGranularity == 0;
}

CUresult check(const CUmemAllocationProp* properties) {
  REQUIRE(properties != nullptr && properties->type == 1 && properties->location.type == 1, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(device_at(properties->location.id) != nullptr, CUDA_ERROR_INVALID_DEVICE);
  return properties->requestedHandleTypes == 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

bool is_reserved(uint64_t begin, uint64_t bytes) {
  auto at = state().ranges.upper_bound(begin);
  return at != state().ranges.begin() && (--at, begin + bytes <= at->first + at->second);
}

bool overlaps_mapping(uint64_t begin, uint64_t bytes) {
  const auto at = state().mappings.lower_bound(begin);
  if (at != state().mappings.end() && at->first < begin + bytes) {
    return true;
  }
  return at != state().mappings.begin() && std::prev(at)->first + std::prev(at)->second.bytes > begin;
}

// Returns the mappings that fill a range; none if the range ends within one, or has a gap.
std::vector<uint64_t> mappings_in(uint64_t begin, uint64_t bytes) {
  std::vector<uint64_t> all;
  uint64_t at = begin;
  while (at < begin + bytes) {
    const auto one = state().mappings.find(at);
    if (one == state().mappings.end() || at + one->second.bytes > begin + bytes) {
      return {};
    }
    all.push_back(at);
    at += one->second.bytes;
  }
  return all;
}

} // namespace

API cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* properties, int option) {
  ENTER();
  REQUIRE(granularity != nullptr && (option == 0 || option == 1), CUDA_ERROR_INVALID_VALUE);
  RETURN_ERROR(check(properties));
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

API cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr, unsigned long long flags) {
  ENTER();
  const bool is_power = (alignment & (alignment - 1)) == 0;
  REQUIRE(address != nullptr && bytes != 0 && is_aligned(bytes) && is_power && flags == 0, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(alignment <= kGranularity, CUDA_ERROR_NOT_SUPPORTED);
  Memory& memory = Memory::the();
  std::lock_guard lock(memory.mutex);
  *address = memory.reserve(bytes);
  REQUIRE(*address != 0, CUDA_ERROR_OUT_OF_MEMORY);
  state().ranges[*address] = bytes;
  return CUDA_SUCCESS;
}

API cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  ENTER();
  Memory& memory = Memory::the();
  std::lock_guard lock(memory.mutex);
  const auto at = state().ranges.find(address);
  REQUIRE(at != state().ranges.end() && at->second == bytes, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(!overlaps_mapping(address, bytes), CUDA_ERROR_INVALID_VALUE);
  state().ranges.erase(at);
  memory.unreserve(address, bytes);
  return CUDA_SUCCESS;
}

API cuMemCreate(
    CUmemGenericAllocationHandle* made, size_t bytes, const CUmemAllocationProp* properties, unsigned long long flags) {
  ENTER();
  REQUIRE(made != nullptr && bytes != 0 && is_aligned(bytes) && flags == 0, CUDA_ERROR_INVALID_VALUE);
  RETURN_ERROR(check(properties));
  Memory& memory = Memory::the();
  std::lock_guard lock(memory.mutex);
  const auto physical = memory.create(device_at(properties->location.id), bytes);
  REQUIRE(physical != nullptr, CUDA_ERROR_OUT_OF_MEMORY);
  static CUmemGenericAllocationHandle last = 0;
  *made = ++last;
  state().handles[*made] = {physical, *properties, 1};
  return CUDA_SUCCESS;
}

API cuMemRelease(CUmemGenericAllocationHandle handle) {
  ENTER();
  std::lock_guard lock(Memory::the().mutex);
  const auto at = state().handles.find(handle);
  REQUIRE(at != state().handles.end(), CUDA_ERROR_INVALID_VALUE);
  if (--at->second.references == 0) {
    state().handles.erase(at);
  }
  return CUDA_SUCCESS;
}

API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  ENTER();
  REQUIRE(handle != nullptr, CUDA_ERROR_INVALID_VALUE);
  std::lock_guard lock(Memory::the().mutex);
  auto at = state().mappings.upper_bound(reinterpret_cast<uint64_t>(address));
  REQUIRE(at != state().mappings.begin(), CUDA_ERROR_INVALID_VALUE);
  --at;
  for (auto& [number, one] : state().handles) {
    if (one.memory == at->second.memory) {
      ++one.references;
      *handle = number;
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_VALUE;
}

API cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties, CUmemGenericAllocationHandle handle) {
  ENTER();
  std::lock_guard lock(Memory::the().mutex);
  const auto at = state().handles.find(handle);
  REQUIRE(properties != nullptr && at != state().handles.end(), CUDA_ERROR_INVALID_VALUE);
  *properties = at->second.properties;
  return CUDA_SUCCESS;
}

API cuMemMap(
    CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  ENTER();
  REQUIRE(bytes != 0 && is_aligned(address) && is_aligned(bytes), CUDA_ERROR_INVALID_VALUE);
  REQUIRE(offset == 0 && flags == 0, CUDA_ERROR_INVALID_VALUE);
  Memory& memory = Memory::the();
  std::lock_guard lock(memory.mutex);
  const auto at = state().handles.find(handle);
  REQUIRE(at != state().handles.end() && bytes == at->second.memory->bytes, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_reserved(address, bytes) && !overlaps_mapping(address, bytes), CUDA_ERROR_INVALID_VALUE);
  const std::shared_ptr<Physical> physical = at->second.memory;
  REQUIRE(memory.map(address, bytes, memory.file(physical->device), physical->offset, 0), CUDA_ERROR_OUT_OF_MEMORY);
  memory.add({address, bytes, MemoryKind::kMapped, physical->device, {}, physical->offset, 0, 0});
  state().mappings[address] = {bytes, physical};
  return CUDA_SUCCESS;
}

API cuMemUnmap(CUdeviceptr address, size_t bytes) {
  ENTER();
  Memory& memory = Memory::the();
  std::lock_guard lock(memory.mutex);
  const std::vector<uint64_t> all = mappings_in(address, bytes);
  REQUIRE(!all.empty(), CUDA_ERROR_INVALID_VALUE);
  for (const uint64_t one : all) {
    Allocation removed;
    memory.remove(one, MemoryKind::kMapped, &removed);
    memory.unmap(one, removed.bytes);
    state().mappings.erase(one);
  }
  return CUDA_SUCCESS;
}

API cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* given, size_t count) {
  ENTER();
  REQUIRE(given != nullptr && count != 0, CUDA_ERROR_INVALID_VALUE);
  Memory& memory = Memory::the();
  std::lock_guard lock(memory.mutex);
  const std::vector<uint64_t> all = mappings_in(address, bytes);
  REQUIRE(!all.empty(), CUDA_ERROR_INVALID_VALUE);
  uint8_t owner = memory.owners()[(address - reinterpret_cast<uint64_t>(memory.arena())) >> kOwnerShift];
  for (size_t i = 0; i < count; ++i) {
    const Device* device = device_at(given[i].location.id);
    const int flags = given[i].flags;
    REQUIRE(given[i].location.type == 1 && device != nullptr, CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(flags == 0 || flags == 1 || flags == 3, CUDA_ERROR_INVALID_VALUE);
    const auto bit = static_cast<uint8_t>(1 << device->ordinal);
    owner = static_cast<uint8_t>(flags == 0 ? owner & ~bit : owner | bit);
  }
  memory.set_owner(address, bytes, owner);
  return CUDA_SUCCESS;
}

API cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  ENTER();
  REQUIRE(flags != nullptr && location != nullptr && location->type == 1, CUDA_ERROR_INVALID_VALUE);
  const Device* device = device_at(location->id);
  REQUIRE(device != nullptr, CUDA_ERROR_INVALID_DEVICE);
  Memory& memory = Memory::the();
  Allocation found;
  REQUIRE(memory.find(address, &found) && found.kind == MemoryKind::kMapped, CUDA_ERROR_INVALID_VALUE);
  const uint8_t owner = memory.owners()[(address - reinterpret_cast<uint64_t>(memory.arena())) >> kOwnerShift];
  *flags = (owner & 1 << device->ordinal) != 0 ? 3 : 0;
  return CUDA_SUCCESS;
}
