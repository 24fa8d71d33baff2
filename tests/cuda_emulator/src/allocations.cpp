// Allocation of device memory and of pinned host memory, and registration of host memory.

#include <sys/mman.h>
#include <unistd.h>

#include "entry.h"
#include "memory.h"
#include "streams.h"

namespace {

constexpr uint64_t kUnit = 1 << kOwnerShift; // memory is accounted for in multiples of this

// The physical memory of allocations, by address.
std::map<uint64_t, std::shared_ptr<Physical>>& backing() {
  static auto& all = *new std::map<uint64_t, std::shared_ptr<Physical>>;
  return all;
}

CUresult allocate(const std::shared_ptr<Context>& context, size_t bytes, CUdeviceptr* address) {
  Memory& memory = Memory::the();
  std::lock_guard lock(memory.mutex);
  auto physical = memory.create(context->device, rounded_up(bytes, kUnit));
  REQUIRE(physical != nullptr, CUDA_ERROR_OUT_OF_MEMORY);
  const uint64_t begin = memory.reserve(bytes);
  REQUIRE(begin != 0, CUDA_ERROR_OUT_OF_MEMORY);
  const auto owner = static_cast<uint8_t>(1 << context->device->ordinal);
  if (!memory.map(begin, bytes, memory.file(context->device), physical->offset, owner)) {
    memory.unreserve(begin, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  memory.add({begin, bytes, MemoryKind::kDevice, context->device, context, physical->offset, 0, 0});
  backing()[begin] = std::move(physical);
  *address = begin;
  return CUDA_SUCCESS;
}

void release(const Allocation& one) {
  Memory& memory = Memory::the();
  std::lock_guard lock(memory.mutex);
  memory.unmap(one.begin, one.bytes);
  memory.unreserve(one.begin, one.bytes);
  backing().erase(one.begin);
}

CUresult allocate_host(const std::shared_ptr<Context>& context, void** address, size_t bytes, unsigned flags) {
  REQUIRE(address != nullptr && bytes != 0 && flags <= 7, CUDA_ERROR_INVALID_VALUE);
  Memory& memory = Memory::the();
  std::lock_guard lock(memory.mutex);
  const uint64_t begin = memory.reserve(bytes);
  REQUIRE(begin != 0 && memory.map_host(begin, bytes), CUDA_ERROR_OUT_OF_MEMORY);
  memory.add({begin, bytes, MemoryKind::kHost, nullptr, context, 0, flags, 0});
  *address = reinterpret_cast<void*>(begin);
  return CUDA_SUCCESS;
}

} // namespace

void free_memory_of(const Context& context) {
  Memory& memory = Memory::the();
  for (const Allocation& one : memory.of(context)) {
    Allocation removed;
    if (memory.remove(one.begin, one.kind, &removed) && one.kind != MemoryKind::kRegistered) {
      release(removed);
    }
  }
}

API cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  ENTER_CONTEXT();
  REQUIRE(free_bytes != nullptr && total != nullptr, CUDA_ERROR_INVALID_VALUE);
  *total = context->device->memory;
  *free_bytes = *total - context->device->used;
  return CUDA_SUCCESS;
}

API cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  ENTER_CONTEXT();
  RETURN_ERROR(refuse_during_capture());
  REQUIRE(address != nullptr && bytes != 0, CUDA_ERROR_INVALID_VALUE);
  return allocate(context, bytes, address);
}

API cuMemFree_v2(CUdeviceptr address) {
  ENTER_CONTEXT();
  if (address == 0) {
    return CUDA_SUCCESS;
  }
  RETURN_ERROR(refuse_during_capture());
  Allocation found;
  REQUIRE(Memory::the().remove(address, MemoryKind::kDevice, &found), CUDA_ERROR_INVALID_VALUE);
  if (const auto of = found.context.lock()) {
    wait_for_all(*of);
  }
  release(found);
  return CUDA_SUCCESS;
}

API cuMemGetAddressRange_v2(CUdeviceptr* begin, size_t* bytes, CUdeviceptr address) {
  ENTER_CONTEXT();
  Allocation found;
  REQUIRE(Memory::the().find(address, &found), CUDA_ERROR_NOT_FOUND);
  if (begin != nullptr) {
    *begin = found.begin;
  }
  if (bytes != nullptr) {
    *bytes = found.bytes;
  }
  return CUDA_SUCCESS;
}

// --- memory of the host ----------------------------------------------------------------------------------------------

API cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
  ENTER_CONTEXT();
  RETURN_ERROR(refuse_during_capture());
  return allocate_host(context, address, bytes, flags);
}

API cuMemAllocHost_v2(void** address, size_t bytes) {
  ENTER_CONTEXT();
  RETURN_ERROR(refuse_during_capture());
  return allocate_host(context, address, bytes, 0);
}

API cuMemFreeHost(void* address) {
  ENTER_CONTEXT();
  RETURN_ERROR(refuse_during_capture());
  Allocation found;
  const auto begin = reinterpret_cast<uint64_t>(address);
  REQUIRE(Memory::the().remove(begin, MemoryKind::kHost, &found), CUDA_ERROR_INVALID_VALUE);
  if (const auto of = found.context.lock()) {
    wait_for_all(*of);
  }
  release(found);
  return CUDA_SUCCESS;
}

API cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  ENTER_CONTEXT();
  RETURN_ERROR(refuse_during_capture());
  REQUIRE(address != nullptr && bytes != 0 && flags <= 15, CUDA_ERROR_INVALID_VALUE);
  Memory& memory = Memory::the();
  std::lock_guard lock(memory.mutex);
  const auto begin = reinterpret_cast<uint64_t>(address);
  REQUIRE(!memory.is_in_arena(begin), CUDA_ERROR_INVALID_VALUE);
  for (const auto& [first, last] : memory.registered()) {
    REQUIRE(begin + bytes <= first || begin >= last, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  }
  memory.add({begin, bytes, MemoryKind::kRegistered, nullptr, context, 0, flags, 0});
  return CUDA_SUCCESS;
}

API cuMemHostUnregister(void* address) {
  ENTER_CONTEXT();
  RETURN_ERROR(refuse_during_capture());
  REQUIRE(address != nullptr, CUDA_ERROR_INVALID_VALUE);
  Allocation found;
  const auto begin = reinterpret_cast<uint64_t>(address);
  REQUIRE(Memory::the().remove(begin, MemoryKind::kRegistered, &found), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  return CUDA_SUCCESS;
}

namespace {

bool find_host(const void* address, Allocation* found) {
  return Memory::the().find(reinterpret_cast<uint64_t>(address), found) && found->device == nullptr;
}

} // namespace

API cuMemHostGetDevicePointer_v2(CUdeviceptr* pointer, void* address, unsigned flags) {
  ENTER_CONTEXT();
  Allocation found;
  REQUIRE(pointer != nullptr && flags == 0 && find_host(address, &found), CUDA_ERROR_INVALID_VALUE);
  *pointer = reinterpret_cast<uint64_t>(address);
  return CUDA_SUCCESS;
}

API cuMemHostGetFlags(unsigned* flags, void* address) {
  ENTER_CONTEXT();
  Allocation found;
  REQUIRE(flags != nullptr && find_host(address, &found), CUDA_ERROR_INVALID_VALUE);
  *flags = found.flags;
  return CUDA_SUCCESS;
}

// --- attributes ------------------------------------------------------------------------------------------------------

namespace {

template <class T>
void store(void* at, T value) {
  *static_cast<T*>(at) = value;
}

CUresult pointer_attribute(void* value, int attribute, const Allocation& found, CUdeviceptr address) {
  const bool is_host = found.device == nullptr;
  switch (attribute) {
    case 1: // context
      store(value, found.context.lock().get());
      return CUDA_SUCCESS;
    case 2: // kind of memory
      store(value, is_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
      return CUDA_SUCCESS;
    case 3: // addresses for kernels and for the host
      store(value, address);
      return CUDA_SUCCESS;
    case 4:
      REQUIRE(is_host, CUDA_ERROR_INVALID_VALUE);
      store(value, address);
      return CUDA_SUCCESS;
    case 7: // identifier
      store(value, found.id);
      return CUDA_SUCCESS;
    case 8: // whether it is managed
      store(value, 0u);
      return CUDA_SUCCESS;
    case 9: // device
      store(value, is_host ? 0 : number_of(found.device));
      return CUDA_SUCCESS;
    case 10: // whether it can be exported
      store(value, static_cast<unsigned>(found.kind == MemoryKind::kDevice));
      return CUDA_SUCCESS;
    case 11: // the range
      store(value, static_cast<CUdeviceptr>(found.begin));
      return CUDA_SUCCESS;
    case 12:
      store(value, static_cast<size_t>(found.bytes));
      return CUDA_SUCCESS;
    case 13: // whether it is mapped
      store(value, 1u);
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

} // namespace

API cuPointerGetAttribute(void* value, int attribute, CUdeviceptr address) {
  ENTER();
  REQUIRE(value != nullptr, CUDA_ERROR_INVALID_VALUE);
  Allocation found;
  REQUIRE(Memory::the().find(address, &found), CUDA_ERROR_INVALID_VALUE);
  return pointer_attribute(value, attribute, found, address);
}
