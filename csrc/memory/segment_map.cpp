#include "memory/segment_map.h"

#include <c10/util/Exception.h>

namespace backplane {

SegmentMap& segment_map() {
  static auto* map = new SegmentMap(); // never destroyed: tensors can be freed while the process exits
  return *map;
}

SegmentMap::Page& SegmentMap::page_at(uintptr_t number) {
  std::atomic<Page*>& leaf = leaves_[number >> kLeafBits];
  Page* pages = leaf.load(std::memory_order_relaxed);
  if (pages == nullptr) {
    pages = new Page[size_t{1} << kLeafBits]();
    leaf.store(pages, std::memory_order_release);
  }
  return pages[number & ((uintptr_t{1} << kLeafBits) - 1)];
}

void SegmentMap::add(Segment* segment, char* address, size_t size) {
  auto begin = reinterpret_cast<uintptr_t>(address);
  TORCH_CHECK(
      (begin + size - 1) >> 48 == 0, "a driver returned the address ", static_cast<void*>(address),
      "; addresses must be below 2^48");
  std::lock_guard<std::mutex> guard(mutex_);
  segment->version.fetch_add(1, std::memory_order_relaxed);
  // Release order: a thread that reads one of these also sees the odd version.
  segment->address.store(address, std::memory_order_release);
  segment->size.store(size, std::memory_order_release);
  segment->version.fetch_add(1, std::memory_order_release);
  for (uintptr_t number = begin >> kPageBits; number <= (begin + size - 1) >> kPageBits; ++number) {
    Page& page = page_at(number);
    bool second = page.segments[0].load(std::memory_order_relaxed) != nullptr;
    TORCH_INTERNAL_ASSERT(!second || page.segments[1].load(std::memory_order_relaxed) == nullptr);
    page.segments[second].store(segment, std::memory_order_release);
  }
}

void SegmentMap::remove(Segment* segment) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto begin = reinterpret_cast<uintptr_t>(segment->begin());
  size_t size = segment->bytes();
  for (uintptr_t number = begin >> kPageBits; number <= (begin + size - 1) >> kPageBits; ++number) {
    Page& page = page_at(number);
    bool second = page.segments[0].load(std::memory_order_relaxed) != segment;
    page.segments[second].store(nullptr, std::memory_order_release);
  }
}

Segment* SegmentMap::find(const void* pointer) const noexcept {
  auto value = reinterpret_cast<uintptr_t>(pointer);
  if (value >> 48 != 0) {
    return nullptr;
  }
  uintptr_t number = value >> kPageBits;
  const Page* pages = leaves_[number >> kLeafBits].load(std::memory_order_acquire);
  if (pages == nullptr) {
    return nullptr;
  }
  for (const auto& entry : pages[number & ((uintptr_t{1} << kLeafBits) - 1)].segments) {
    Segment* segment = entry.load(std::memory_order_acquire);
    while (segment != nullptr) {
      uint64_t version = segment->version.load(std::memory_order_acquire);
      bool inside = segment->contains(pointer);
      std::atomic_thread_fence(std::memory_order_acquire);
      if ((version & 1) == 0 && segment->version.load(std::memory_order_relaxed) == version) {
        if (inside) {
          return segment;
        }
        break;
      }
    }
  }
  return nullptr;
}

} // namespace backplane
