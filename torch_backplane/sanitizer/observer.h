// Checks bounds, races and barriers of launches: an observer of the interpreter (interpreter/interpreter.h).

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "checks.h"
#include "interpreter.h"

namespace observer {
namespace {

// --- interface to Python: device.py declares the same structure --------------------------------------------------------

// The requested memory that contains an address. `fixed`: this cannot change while the segment exists.
struct Extent {
  uint64_t begin;
  uint64_t bytes;
  uint64_t fixed;
};
using Resolve = int (*)(uint64_t address, Extent* extent);

// --- state -----------------------------------------------------------------------------------------------------------

Cell* shadow = nullptr;  // of the arena
std::vector<Cell> local_shadow;

struct Operand {
  uint64_t begin, end;  // of its memory
  uint64_t pointer;     // the value of the argument
  uint64_t argument;
  uint64_t slot_begin, slot_end;  // its segment, with the inaccessible memory around it
};

using Operands = std::vector<Operand>;

Operands operands;              // of the launch
size_t recent = 0;              // index of the operand accessed last
std::vector<Finding> findings;  // of all launches, until Python takes them
std::mutex findings_mutex;
std::atomic<uint64_t> launches{0};
std::atomic<uint64_t> accesses{0};
uint64_t launch_accesses = 0;
bool raises = true;

std::atomic<Resolve> resolve{nullptr};
std::mutex extents_mutex;
std::map<uint64_t, Extent> extents;  // by segment

// --- checks ----------------------------------------------------------------------------------------------------------

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
  if (Finding* noted = note(kStray, kNoArgument)) {
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
        local_shadow.data() + offset, size, group_run, local_epoch, kLocalRace, kNoArgument,
        static_cast<int64_t>(offset));
    return;
  }
  const bool is_constant = address >= kernel.image_begin && address + size <= kernel.local_begin - kLocalGuard;
  if (!is_constant && !is_own(address)) {
    out_of_bounds(address, size, access);
  }
}

// --- groups and items ------------------------------------------------------------------------------------------------

void group_begins() {
  check_group_begins();
}

void item_begins() {
  check_item_begins();
}

void item_stops() {}

void subgroup_meets(uint32_t subgroup) {
  ++subgroup_epochs[subgroup];
}

void exchange_ends() {}

void phase_ends(bool diverges, uint32_t ended) {
  check_phase_ends(diverges, ended);
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
  if (!check_begins()) {
    return -1;
  }
  operands = std::move(given);
  recent = 0;
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
  if (shadow == nullptr && (shadow = reserve_cells(kArena)) == nullptr) {
    return false;
  }
  std::lock_guard lock(extents_mutex);
  extents[address] = {address, bytes, 0};
  return true;
}

void freed(uint64_t address, uint64_t bytes) {
  forget_cells(shadow + (address - reinterpret_cast<uint64_t>(arena)), bytes);
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
