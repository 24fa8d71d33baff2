// Checks bounds, races and barriers of launches: an observer of the interpreter (interpreter/interpreter.h).

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "interpreter.h"

namespace observer {
namespace {

// --- interface to Python: findings.py and device.py declare the same structures --------------------------------------

enum Kind : uint64_t { kOutOfBounds, kRace, kLocalRace, kBarrier, kStray };

struct Finding {
  uint64_t kernel;
  uint64_t kind;
  uint64_t access;        // by `item`
  uint64_t other_access;  // by `other_item`, for a race
  uint64_t argument;      // whose memory was accessed; the first one if several share it
  int64_t offset;         // bytes from the argument's pointer; from the beginning of local memory; or the address
  uint64_t size;          // of the access
  int64_t begin;          // of the argument's memory, in bytes from its pointer: 0 or less
  int64_t end;
  uint64_t item;  // its number in its group
  uint64_t group;
  uint64_t other_item;
  uint64_t other_group;
  uint64_t count;  // findings of this kind and argument in the launch
};

// The requested memory that contains an address. `fixed`: this cannot change while the segment exists.
struct Extent {
  uint64_t begin;
  uint64_t bytes;
  uint64_t fixed;
};
using Resolve = int (*)(uint64_t address, Extent* extent);

// --- shadow memory: the last accesses to each byte -------------------------------------------------------------------

struct Visit {
  uint32_t item;  // its number in the launch
  uint16_t epoch;
  Access access;
};

struct Cell {
  uint32_t run;  // the launch (for local memory, the run of a group) that the cell is for; it is empty for any other
  Visit writer;
  Visit reader;
  Visit other;  // another reader or swapper, from another group if possible
};

Cell* shadow = nullptr;  // of the arena
std::vector<Cell> local_shadow;

// --- state -----------------------------------------------------------------------------------------------------------

struct Operand {
  uint64_t begin, end;  // of its memory
  uint64_t pointer;     // the value of the argument
  uint64_t argument;
  uint64_t slot_begin, slot_end;  // its segment, with the inaccessible memory around it
};

using Operands = std::vector<Operand>;

Operands operands;              // of the launch
size_t recent = 0;              // index of the operand accessed last
std::vector<Finding> found;     // in this launch
std::vector<Finding> findings;  // of all launches, until Python takes them
std::mutex findings_mutex;
std::atomic<uint64_t> launches{0};
std::atomic<uint64_t> accesses{0};
uint64_t launch_accesses = 0;
bool raises = true;

std::atomic<Resolve> resolve{nullptr};
std::mutex extents_mutex;
std::map<uint64_t, Extent> extents;  // by segment

uint32_t launch_number = 0, group_run = 0;
uint32_t group_items = 1;
uint32_t self = 0;  // the number of the item in the launch, group after group
uint16_t global_epoch = 0, local_epoch = 0;  // number of barriers with the flag that the group has passed
size_t found_before = 0;  // number of findings before the group

Finding* note(Kind kind, uint64_t argument) {
  for (Finding& one : found) {
    if (one.kind == kind && one.argument == argument) {
      ++one.count;
      return nullptr;
    }
  }
  Finding one{};
  one.kernel = launch.kernel->number;
  one.kind = kind;
  one.argument = argument;
  one.item = item;
  one.group = group;
  one.count = 1;
  found.push_back(one);
  return &found.back();
}

// --- checks ----------------------------------------------------------------------------------------------------------

inline bool is_apart(const Visit& one) {
  return one.item / group_items != group;
}

// Records an access. Returns whether it races with an earlier one, which is stored in `conflict`.
template <Access access>
inline bool enter(Cell& cell, uint32_t run, uint16_t epoch, Visit* conflict) {
  if (cell.run != run) {
    cell = {run, {}, {}, {}};
  }
  const auto meets = [&](const Visit& one) {
    const bool is_race = one.access != kNone && one.item != self && (one.epoch == epoch || is_apart(one));
    if (is_race) {
      *conflict = one;
    }
    return is_race;
  };
  bool is_race = meets(cell.writer);
  const Visit own{self, epoch, access};
  if (access == kWrite) {
    is_race = meets(cell.reader) || meets(cell.other) || is_race;
    cell = {run, own, {}, {}};
    return is_race;
  }
  if (cell.reader.access != kNone && cell.reader.item != self &&
      (is_apart(cell.reader) || cell.other.access == kNone || !is_apart(cell.other))) {
    cell.other = cell.reader;
  }
  cell.reader = own;
  return is_race;
}

template <Access access>
inline void enter_all(
    Cell* cells, uint64_t size, uint32_t run, uint16_t epoch, Kind kind, uint64_t argument, int64_t offset) {
  for (uint64_t i = 0; i < size; ++i) {
    Visit conflict;
    if (__builtin_expect(enter<access>(cells[i], run, epoch, &conflict), 0)) {
      if (Finding* one = note(kind, argument)) {
        one->access = access;
        one->other_access = conflict.access;
        one->offset = offset + static_cast<int64_t>(i);
        one->size = size;
        one->other_item = conflict.item % group_items;
        one->other_group = conflict.item / group_items;
      }
      // The other bytes of the access belong to the same pair.
      for (++i; i < size; ++i) {
        enter<access>(cells[i], run, epoch, &conflict);
      }
    }
  }
}

[[noreturn]] void out_of_bounds(uint64_t address, uint64_t size, Access access) {
  // The operand whose segment is next to the address.
  for (const Operand& one : operands) {
    if (address >= one.slot_begin && address < one.slot_end) {
      if (Finding* noted = note(kOutOfBounds, one.argument)) {
        noted->access = access;
        noted->offset = static_cast<int64_t>(address - one.pointer);
        noted->size = size;
        noted->begin = static_cast<int64_t>(one.begin - one.pointer);
        noted->end = static_cast<int64_t>(one.end - one.pointer);
      }
      end_item();
    }
  }
  if (Finding* noted = note(kStray, ~uint64_t{0})) {
    noted->access = access;
    noted->offset = static_cast<int64_t>(address);
    noted->size = size;
  }
  end_item();
}

template <Access access>
inline void touch(uint64_t address, uint64_t size, uint64_t) {
  if (size == 0) {
    return;
  }
  if (__builtin_expect(in_arena(address), 1)) {
    ++launch_accesses;
    if (recent >= operands.size() || address < operands[recent].begin || address + size > operands[recent].end) {
      for (recent = 0; recent < operands.size(); ++recent) {
        if (address >= operands[recent].begin && address + size <= operands[recent].end) {
          break;
        }
      }
      if (recent == operands.size()) {
        out_of_bounds(address, size, access);
      }
    }
    const Operand& one = operands[recent];
    enter_all<access>(
        shadow + (address - reinterpret_cast<uint64_t>(arena)), size, launch_number, global_epoch, kRace, one.argument,
        static_cast<int64_t>(address - one.pointer));
    return;
  }
  const Kernel& kernel = *launch.kernel;
  if (address >= kernel.local_begin && address + size <= kernel.local_end) {
    const uint64_t offset = address - kernel.local_begin;
    enter_all<access>(
        local_shadow.data() + offset, size, group_run, local_epoch, kLocalRace, ~uint64_t{0},
        static_cast<int64_t>(offset));
    return;
  }
  const bool is_constant = address >= kernel.image_begin && address < kernel.local_begin;
  if (!is_constant && !is_own(address)) {
    out_of_bounds(address, size, access);
  }
}

// --- groups and items ------------------------------------------------------------------------------------------------

void group_begins() {
  ++group_run;
  global_epoch = local_epoch = 0;
  found_before = found.size();
}

void item_begins() {
  self = static_cast<uint32_t>(group * group_items + item);
}

void item_stops() {}

void exchange_ends() {}

void phase_ends(bool diverges, uint32_t ended) {
  if (diverges && found.size() == found_before) {
    item = ended;
    note(kBarrier, ~uint64_t{0});
  }
  local_epoch = static_cast<uint16_t>(local_epoch + ((barrier_flags & kLocal) != 0 ? 1 : 0));
  global_epoch = static_cast<uint16_t>(global_epoch + ((barrier_flags & kGlobal) != 0 ? 1 : 0));
}

// --- launches --------------------------------------------------------------------------------------------------------

// Returns the requested memory that contains an address, or if the allocator does not know it, that of the segment.
Extent extent_of(uint64_t address, uint64_t segment) {
  Extent extent{};
  {
    std::lock_guard lock(extents_mutex);
    extent = extents[segment];
  }
  const Resolve ask = resolve.load();
  if (extent.fixed == 0 && ask != nullptr && ask(address, &extent) != 0 && extent.fixed != 0) {
    std::lock_guard lock(extents_mutex);
    extents[segment] = extent;
  }
  return extent;
}

Operands operands_of(const Argument* given, uint64_t count) {
  Operands all;
  for (uint64_t i = 0; i < count; ++i) {
    if (given[i].bytes != 0 || given[i].memory == nullptr) {
      continue;
    }
    const uint64_t pointer = reinterpret_cast<uint64_t>(given[i].memory) + given[i].offset;
    uint64_t bytes = 0;
    const uint64_t slot = segment_before(pointer, &bytes);
    if (slot == 0) {
      continue;
    }
    const Extent extent = extent_of(pointer, slot);
    const bool is_known =
        std::any_of(all.begin(), all.end(), [&](const Operand& one) { return one.begin == extent.begin; });
    if (!is_known) {
      all.push_back({extent.begin, extent.begin + extent.bytes, pointer, i, slot - kPage / 2, slot + bytes + kPage / 2});
    }
  }
  return all;
}

int run(Operands&& given) {
  if (launch.group_count * launch.group_items > ~uint32_t{0}) {
    return -1;
  }
  group_items = static_cast<uint32_t>(launch.group_items);
  operands = std::move(given);
  recent = 0;
  found.clear();
  ++launch_number;
  launch_accesses = 0;
  local_shadow.resize(std::max<size_t>(local_shadow.size(), launch.kernel->local_end - launch.kernel->local_begin));
  for (uint64_t number = 0; number < launch.group_count; ++number) {
    run_group(number);
  }
  ++launches;
  accesses += launch_accesses;
  if (found.empty()) {
    return 0;
  }
  std::lock_guard lock(findings_mutex);
  findings.insert(findings.end(), found.begin(), found.end());
  return raises ? 1 : 0;
}

void transferred(uint64_t) {}

bool allocated(uint64_t address, uint64_t bytes) {
  if (shadow == nullptr) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* cells = mmap(nullptr, kArena * sizeof(Cell), PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (cells == MAP_FAILED) {
      return false;
    }
    shadow = static_cast<Cell*>(cells);
  }
  std::lock_guard lock(extents_mutex);
  extents[address] = {address, bytes, 0};
  return true;
}

void freed(uint64_t address, uint64_t bytes) {
  madvise(shadow + (address - reinterpret_cast<uint64_t>(arena)), bytes * sizeof(Cell), MADV_DONTNEED);
  std::lock_guard lock(extents_mutex);
  extents.erase(address);
}

}  // namespace
}  // namespace observer

extern "C" {

void sanitizer_configure(observer::Resolve function, uint64_t raising) {
  observer::resolve = function;
  observer::raises = raising != 0;
}

// Returns the number of findings. Copies up to `most` of them, and unless that is 0, forgets all.
uint64_t sanitizer_take(observer::Finding* out, uint64_t most) {
  std::lock_guard lock(observer::findings_mutex);
  const uint64_t count = observer::findings.size();
  if (most != 0) {
    std::copy_n(observer::findings.begin(), std::min(count, most), out);
    observer::findings.clear();
  }
  return count;
}

uint64_t sanitizer_count(uint64_t which) {
  return which == 0 ? observer::launches.load() : which == 1 ? observer::accesses.load() : sizeof(observer::Finding);
}
}
