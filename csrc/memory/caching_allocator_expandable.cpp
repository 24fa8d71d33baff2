// Expandable segments: one long range of address space for each pool and stream, into which memory is mapped page by
// page as the program needs more. Blocks can merge where ordinary segments would have borders.
//
// A page (2 MiB in the small pool, large_segment_size in the large one) is mapped and unmapped as a whole. The blocks
// of a segment cover its whole address space. Blocks without memory are marked as unmapped, and start and end at page
// boundaries.
#include "memory/caching_allocator.h"

#include "memory/allocator_config.h"
#include "memory/segment_map.h"

namespace backplane {

namespace {

size_t round_up(size_t value, size_t unit) {
  return (value + unit - 1) / unit * unit;
}

} // namespace

// The first block from which on enough consecutive space is free or unmapped, at the lowest address.
Block* DeviceCachingAllocator::find_room(const Request& request) const {
  for (Block* block : request.pool->unmapped) {
    if (block->segment->stream != request.stream) {
      continue;
    }
    Block* start = block->previous != nullptr && block->previous->is_free() ? block->previous : block;
    size_t room = 0;
    for (Block* part = start; part != nullptr && part->is_free() && room < request.size; part = part->next) {
      room += part->size;
    }
    if (room >= request.size) {
      return start;
    }
  }
  return nullptr;
}

Segment* DeviceCachingAllocator::reserve_segment(Lock& lock, const Request& request) {
  size_t page = request.pool->small ? kSmallSegment : allocator_settings().large_segment_size.load();
  // More than the memory of the device, so that holes inside do not matter much.
  size_t size = round_up(std::max(total_memory_ + total_memory_ / 8, request.size), page);
  void* address = outside(lock, [&] { return device_.reserve(size); });
  if (address == nullptr) {
    return nullptr;
  }
  Segment* segment = nullptr;
  try {
    segment = new_segment(request, static_cast<char*>(address), size, page);
  } catch (const std::exception&) {
    outside(lock, [&] { device_.unreserve(address, size); });
    throw;
  }
  segment->first->mapped = false;
  request.pool->unmapped.insert(segment->first);
  return segment;
}

// Like obtain_segment: returns a free block of at least the request's size that is in no list, or nullptr.
Block* DeviceCachingAllocator::expand(Lock& lock, Request& request) {
  Block* start = find_room(request);
  while (start == nullptr) {
    if (reserve_segment(lock, request) == nullptr) {
      return nullptr;
    }
    start = find_room(request);
  }
  Segment* segment = start->segment;
  BlockPool& pool = *segment->pool;

  // Mark the blocks as busy: other threads must not use them while the lock is released.
  std::vector<Block*> run;
  std::vector<Block*> to_map;
  size_t room = 0;
  size_t added = 0;
  for (Block* block = start; room < request.size; block = block->next) {
    if (block->mapped) {
      segment->free_blocks->erase(block);
    } else {
      pool.unmapped.erase(block);
      size_t needed = round_up(request.size - room, segment->page);
      if (needed < block->size) {
        Block* rest = new_block(segment, block->address + needed, block->size - needed);
        rest->mapped = false;
        rest->previous = block;
        rest->next = block->next;
        if (rest->next != nullptr) {
          rest->next->previous = rest;
        }
        block->next = rest;
        block->size = needed;
        pool.unmapped.insert(rest);
      }
      to_map.push_back(block);
      added += block->size;
    }
    block->busy = true;
    run.push_back(block);
    room += block->size;
  }

  reserved_ += added;
  std::exception_ptr failure;
  bool mapped = outside(lock, [&] {
    std::vector<char*> pages;
    try {
      bool enough = true;
      for (Block* block : to_map) {
        for (size_t offset = 0; enough && offset < block->size; offset += segment->page) {
          enough = device_.map(block->address + offset, segment->page);
          if (enough) {
            pages.push_back(block->address + offset);
          }
        }
      }
      if (enough) {
        return true;
      }
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    for (char* page : pages) {
      unmap(page, segment->page, failure);
    }
    return false;
  });

  int64_t merged = 0;
  if (!mapped) {
    reserved_ -= added;
    std::vector<Segment*> unused;
    for (Block* block : run) {
      block->busy = false;
      if (block->mapped) {
        block = merge_if_free(block, block->previous, &merged);
        insert_free(merge_if_free(block, block->next, &merged));
      } else if (Segment* empty = return_unmapped(block, request.context)) {
        unused.push_back(empty);
      }
    }
    give_back(lock, unused, failure);
    return nullptr;
  }
  for (Block* block : to_map) {
    increase_reserved(pool, block->size);
    stats_.num_device_alloc += 1;
    has_allocated_ = true;
    history_.record(
        TraceAction::SegmentMap, block->address, block->size, segment->stream, id_of(pool), request.context);
  }
  Block* whole = run.front();
  whole->mapped = true;
  whole->busy = false;
  for (size_t i = 1; i < run.size(); ++i) {
    whole->size += run[i]->size;
    whole->next = run[i]->next;
    recycle(run[i]);
  }
  if (whole->next != nullptr) {
    whole->next->previous = whole;
  }
  whole = merge_if_free(whole, whole->previous, &merged);
  return merge_if_free(whole, whole->next, &merged);
}

// Keeps the first failure. A page that the device fails to unmap counts as unmapped, since nothing can use it.
void DeviceCachingAllocator::unmap(char* page, size_t bytes, std::exception_ptr& failure) {
  try {
    device_.unmap(page, bytes);
  } catch (const std::exception&) {
    failure = failure == nullptr ? std::current_exception() : failure;
  }
}

// Reinserts an unmapped block. If its segment has no mapped block left, detaches the segment and returns it.
Segment* DeviceCachingAllocator::return_unmapped(Block* block, const Context& context) {
  int64_t merged = 0;
  block = merge_if_free(block, block->previous, &merged);
  block = merge_if_free(block, block->next, &merged);
  if (!block->is_split()) {
    return detach(block->segment, context);
  }
  block->segment->pool->unmapped.insert(block);
  return nullptr;
}

// Returns the whole pages inside free blocks to the device.
void DeviceCachingAllocator::unmap_free_pages(
    Lock& lock, const std::function<bool(const BlockPool&)>& selected, const Context& context) {
  std::vector<Block*> free_blocks;
  for (Segment* segment : segments_) {
    if (segment->is_expandable() && selected(*segment->pool)) {
      for (Block* block = segment->first; block != nullptr; block = block->next) {
        if (block->mapped && block->is_free()) {
          free_blocks.push_back(block);
        }
      }
    }
  }
  std::vector<Block*> to_unmap;
  for (Block* block : free_blocks) {
    Segment* segment = block->segment;
    size_t offset = block->address - segment->begin();
    size_t first = round_up(offset, segment->page);
    size_t last = (offset + block->size) / segment->page * segment->page;
    if (first >= last) {
      continue;
    }
    // Split off the parts before the first whole page and after the last one, which stay free blocks.
    segment->free_blocks->erase(block);
    auto cut = [&](size_t at) {
      Block* rest = new_block(segment, segment->begin() + at, block->address + block->size - (segment->begin() + at));
      rest->previous = block;
      rest->next = block->next;
      if (rest->next != nullptr) {
        rest->next->previous = rest;
      }
      block->next = rest;
      block->size -= rest->size;
      return rest;
    };
    if (last < offset + block->size) {
      insert_free(cut(last));
    }
    if (first > offset) {
      Block* whole_pages = cut(first);
      insert_free(block);
      block = whole_pages;
    }
    block->busy = true;
    to_unmap.push_back(block);
  }
  if (to_unmap.empty()) {
    return;
  }
  std::exception_ptr failure;
  outside(lock, [&] {
    for (Block* block : to_unmap) {
      for (size_t offset = 0; offset < block->size; offset += block->segment->page) {
        unmap(block->address + offset, block->segment->page, failure);
      }
    }
  });
  std::vector<Segment*> unused;
  for (Block* block : to_unmap) {
    Segment* segment = block->segment;
    block->busy = false;
    block->mapped = false;
    reserved_ -= block->size;
    decrease_reserved(*segment->pool, block->size);
    stats_.num_device_free += 1;
    history_.record(
        TraceAction::SegmentUnmap, block->address, block->size, segment->stream, id_of(*segment->pool),
        context ? context : segment->context);
    if (Segment* empty = return_unmapped(block, context)) {
      unused.push_back(empty);
    }
  }
  give_back(lock, unused, failure);
}

} // namespace backplane
