#include "devices/address_space.h"

#include <c10/util/Exception.h>

#include <array>
#include <mutex>

#include "devices/pages.h"

namespace backplane {
namespace {

// A range that the thread resolved recently. Valid while its generation is that of the address space.
struct Recent {
  uint64_t generation = 0;
  const char* start = nullptr;
  size_t bytes = 0;
  void* handle = nullptr;
};

constexpr size_t kRecent = 8;
thread_local std::array<Recent, kRecent> recent;
thread_local size_t next_recent = 0;

} // namespace

uint64_t AddressSpace::next_generation() noexcept {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

void* AddressSpace::reserve(size_t bytes) {
  void* address = pages::reserve(bytes);
  TORCH_CHECK(address != nullptr, "cannot reserve ", bytes, " bytes of address space");
  return address;
}

void AddressSpace::release(void* address, size_t bytes) {
  pages::release(address, bytes);
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
  generation_.store(next_generation(), std::memory_order_release);
  return handle;
}

AddressSpace::Place AddressSpace::resolve(const void* address, size_t bytes, const char* owner) const {
  const char* first = static_cast<const char*>(address);
  const uint64_t now = generation();
  for (const Recent& range : recent) {
    const auto offset = static_cast<size_t>(first - range.start);
    if (range.generation == now && offset < range.bytes && bytes <= range.bytes - offset) {
      return {range.handle, offset};
    }
  }
  return search(first, bytes, owner);
}

AddressSpace::Place AddressSpace::search(const char* first, size_t bytes, const char* owner) const {
  std::shared_lock<std::shared_mutex> guard(lock_);
  auto after = ranges_.upper_bound(first);
  if (after != ranges_.begin()) {
    const auto& [start, range] = *--after;
    const auto offset = static_cast<size_t>(first - start);
    if (offset < range.bytes && bytes <= range.bytes - offset) {
      recent[next_recent++ % kRecent] = Recent{generation(), start, range.bytes, range.handle};
      return {range.handle, offset};
    }
  }
  TORCH_CHECK(false, bytes, " bytes at ", static_cast<const void*>(first), " are not memory of ", owner);
}

} // namespace backplane
