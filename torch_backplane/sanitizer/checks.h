// What finds races and divergent barriers of launches, for observers of the interpreter (interpreter/interpreter.h):
// findings, shadow memory and the order that barriers impose. The observer checks bounds.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "interpreter.h"

namespace observer {
namespace {

// --- findings: findings.py declares the same structure ---------------------------------------------------------------

enum Kind : uint64_t { kOutOfBounds, kRace, kLocalRace, kBarrier, kStray };

constexpr uint64_t kNoArgument = ~uint64_t{0};

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

std::vector<Finding> found;  // in this launch

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

// --- shadow memory: the last accesses to each byte -------------------------------------------------------------------

struct Visit {
  uint32_t item;  // its number in the launch
  uint32_t epoch : 15;
  uint32_t subgroup_epoch : 15;
  uint32_t access : 2;
};

struct Cell {
  uint32_t run;  // the launch (for local memory, the run of a group) that the cell is for; it is empty for any other
  Visit writer;
  Visit reader;
  Visit other;  // another reader or swapper, from another group if possible
};

// Reserves cells for a number of bytes, which take memory when they are first used. Returns null if that is not possible.
Cell* reserve_cells(uint64_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* cells = mmap(nullptr, bytes * sizeof(Cell), PROT_READ | PROT_WRITE, kFlags, -1, 0);
  return cells == MAP_FAILED ? nullptr : static_cast<Cell*>(cells);
}

void forget_cells(Cell* cells, uint64_t bytes) {
  madvise(cells, bytes * sizeof(Cell), MADV_DONTNEED);
}

// --- races -----------------------------------------------------------------------------------------------------------

uint32_t launch_number = 0, group_run = 0;
uint32_t group_items = 1;
uint32_t self = 0;  // the number of the item in the launch, group after group
uint16_t global_epoch = 0, local_epoch = 0;  // number of barriers with the flag that the group has passed
std::vector<uint16_t> subgroup_epochs;       // barriers of subgroups that each one has passed

inline bool is_apart(const Visit& one) {
  return one.item / group_items != group;
}

// Whether a barrier orders an earlier access before this one.
inline bool is_ordered(const Visit& one, uint16_t epoch, uint16_t subgroup_epoch) {
  if (is_apart(one)) {
    return false;
  }
  return one.epoch != epoch ||
      (one.subgroup_epoch != subgroup_epoch && one.item % group_items / kSubgroup == item / kSubgroup);
}

// Records an access. Returns whether it races with an earlier one, which is stored in `conflict`.
template <Access access>
inline bool enter(Cell& cell, uint32_t run, uint16_t epoch, Visit* conflict) {
  if (cell.run != run) {
    cell = {run, {}, {}, {}};
  }
  constexpr uint16_t kEpochs = (1 << 15) - 1;
  const uint16_t at = epoch & kEpochs, subgroup_at = subgroup_epochs[item / kSubgroup] & kEpochs;
  const auto meets = [&](const Visit& one) {
    const bool is_race = one.access != kNone && one.item != self && !is_ordered(one, at, subgroup_at);
    if (is_race) {
      *conflict = one;
    }
    return is_race;
  };
  bool is_race = meets(cell.writer);
  Visit own;
  own.item = self;
  own.epoch = at;
  own.subgroup_epoch = subgroup_at;
  own.access = access;
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

// --- launches, groups and items --------------------------------------------------------------------------------------

size_t found_before = 0;  // number of findings before the group

// Returns whether the launch has few enough work items for the checks.
bool check_begins() {
  group_items = static_cast<uint32_t>(launch.group_items);
  found.clear();
  ++launch_number;
  return launch.group_count * launch.group_items <= ~uint32_t{0};
}

void check_group_begins() {
  ++group_run;
  global_epoch = local_epoch = 0;
  subgroup_epochs.assign((group_items + kSubgroup - 1) / kSubgroup, 0);
  found_before = found.size();
}

void check_item_begins() {
  self = static_cast<uint32_t>(group * group_items + item);
}

void check_phase_ends(bool diverges, uint32_t ended) {
  if (diverges && found.size() == found_before) {
    item = ended;
    note(kBarrier, kNoArgument);
  }
  local_epoch = static_cast<uint16_t>(local_epoch + ((barrier_flags & kLocal) != 0 ? 1 : 0));
  global_epoch = static_cast<uint16_t>(global_epoch + ((barrier_flags & kGlobal) != 0 ? 1 : 0));
}

}  // namespace
}  // namespace observer
