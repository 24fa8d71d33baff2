#include "address_space.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <mutex>

namespace backplane {

void* AddressSpace::reserve(size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "cannot reserve ", bytes, " bytes of address space");
  return address;
}

void AddressSpace::release(void* address, size_t bytes) {
  munmap(address, bytes);
}

void AddressSpace::insert(void* address, size_t bytes, void* handle) {
  std::unique_lock<std::shared_mutex> guard(lock_);
  ranges_[static_cast<const char*>(address)] = Range{bytes, handle};
}

void* AddressSpace::remove(void* address) {
  std::unique_lock<std::shared_mutex> guard(lock_);
  const auto found = ranges_.find(static_cast<const char*>(address));
  TORCH_CHECK(found != ranges_.end(), address, " is not the start of an allocated segment");
  void* handle = found->second.handle;
  ranges_.erase(found);
  return handle;
}

AddressSpace::Place AddressSpace::resolve(const void* address, size_t bytes, const char* owner) const {
  const char* first = static_cast<const char*>(address);
  std::shared_lock<std::shared_mutex> guard(lock_);
  auto after = ranges_.upper_bound(first);
  if (after != ranges_.begin()) {
    const auto& [start, range] = *--after;
    const auto offset = static_cast<size_t>(first - start);
    if (offset < range.bytes && bytes <= range.bytes - offset) {
      return {range.handle, offset};
    }
  }
  TORCH_CHECK(false, bytes, " bytes at ", address, " are not memory of ", owner);
}

} // namespace backplane
