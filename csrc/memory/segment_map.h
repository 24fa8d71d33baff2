// Maps any address inside a segment of any device to that segment, without a lock.
//
// Addresses are looked up by 2 MiB page. Segments are at least that long, so a page overlaps at most two of them. A
// read can race with a change of the *other* segment in a page; a segment's version (odd while it changes) reveals
// that.
#pragma once

#include "memory/allocator_blocks.h"

#include <mutex>

namespace backplane {

class SegmentMap {
 public:
  // Publishes a segment: sets its range, so that find() returns it. Throws for an address of more than 48 bits.
  void add(Segment* segment, char* address, size_t size);
  // Hides a segment from find(). Its range stays readable until it is added again.
  void remove(Segment* segment);
  Segment* find(const void* pointer) const noexcept;

 private:
  static constexpr int kPageBits = 21;
  static constexpr int kLeafBits = 13; // one leaf covers 16 GiB
  static constexpr int kRootBits = 48 - kPageBits - kLeafBits;

  struct Page {
    std::atomic<Segment*> segments[2];
  };

  Page& page_at(uintptr_t number);

  std::mutex mutex_; // for writers
  std::atomic<Page*> leaves_[size_t{1} << kRootBits] = {};
};

SegmentMap& segment_map();

} // namespace backplane
