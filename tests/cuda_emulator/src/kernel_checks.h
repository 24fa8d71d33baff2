// CUDA_EMULATOR_CHECKS: what compute-sanitizer's memcheck, racecheck and synccheck find, and global races. Bounds are those
// of single allocations, variables, and blocks that the program has told (emulator_resolve_bounds).

#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <unordered_map>
#include <vector>

#include "checks.h"
#include "interpreter.h"
#include "kernel_launch.h"

namespace observer {
namespace {

constexpr int kIllegalAddress = 700, kMisalignedAddress = 716, kLaunchFailed = 719;
constexpr uint64_t kSharedMemory = kNoArgument - 1; // in place of the number of a range

KernelLaunchFacts* facts = nullptr; // of the running launch
uint64_t recent_range = 0; // the range accessed last

Cell* shadow = nullptr; // of the arena
uint64_t shadow_begin = 0;
std::vector<Cell> shared_shadow; // of static shared memory, and of the dynamic one behind it
std::unordered_map<uint64_t, std::vector<Cell>> image_shadows; // by the beginning of the image

[[noreturn]] void stop(int error) {
  if (facts->error == 0) {
    facts->error = error;
  }
  end_item();
}

[[noreturn]] void stop_after_finding(int error) {
  facts->continues ? end_item() : stop(error);
}

// --- messages --------------------------------------------------------------------------------------------------------

std::string triple(uint64_t number, const uint64_t* sizes) {
  return "(" + std::to_string(number % sizes[0]) + "," + std::to_string(number / sizes[0] % sizes[1]) + "," +
      std::to_string(number / sizes[0] / sizes[1]) + ")";
}

std::string place(uint64_t thread, uint64_t block) {
  return "thread " + triple(thread, launch.group) + " in block " + triple(block, launch.groups);
}

std::string verb(uint64_t access) {
  return access == kRead ? "reads" : access == kWrite ? "writes" : "atomically updates";
}

// The accessed element or byte.
std::string target(const Finding& one) {
  if (one.argument == kSharedMemory) {
    return "byte " + std::to_string(one.offset) + " of shared memory";
  }
  const KernelRange& range = facts->memory[one.argument];
  const auto element = static_cast<int64_t>(range.element);
  const int64_t index = (one.offset - (one.offset < 0 ? element - 1 : 0)) / element;
  return range.name == nullptr ? "byte " + std::to_string(one.offset) + " of an allocation of " +
          std::to_string(range.end - range.begin) + " bytes"
                               : "index " + std::to_string(index) + " of " + range.name;
}

std::string bounds(const Finding& one) {
  if (one.argument == kSharedMemory) {
    return target(one) + ", which has " + std::to_string(one.end) + " bytes";
  }
  if (one.kind == kOutOfBounds) {
    const KernelRange& range = facts->memory[one.argument];
    const std::string before = one.begin == 0 ? "" : " and " + std::to_string(-one.begin) + " bytes before";
    return target(one) +
        (range.name == nullptr ? std::string() : ", which has " +
                 std::to_string(static_cast<uint64_t>(one.end) / range.element) + " elements of " +
                 std::to_string(range.element) + " bytes from there on" + before);
  }
  char text[64];
  snprintf(text, sizeof text, "address %#lx, which is in ", one.offset);
  const auto address = static_cast<uint64_t>(one.offset);
  for (uint64_t i = 0; i < facts->freed_count; ++i) {
    if (address >= facts->freed[i].first && address < facts->freed[i].second) {
      return text + std::string("freed memory");
    }
  }
  return text + std::string("no allocation");
}

std::string message(const Finding& one) {
  const std::string who = place(one.item, one.group), in_kernel = std::string("kernel ") + facts->name + ": ";
  if (one.kind == kBarrier) {
    return "synccheck: Divergent thread(s) in block: " + in_kernel + who +
        " does not reach a barrier or shuffle where others of its block wait";
  }
  if (one.kind == kRace || one.kind == kLocalRace) {
    const char* hazard = one.access == kRead ? "RAW" : one.other_access == kRead ? "WAR" : "WAW";
    return std::string("racecheck: ") + hazard + " hazard: " + in_kernel + who + " " + verb(one.access) + " and " +
        place(one.other_item, one.other_group) + " " + verb(one.other_access) + " " + target(one) +
        ", and no barrier orders them";
  }
  const char *space = one.argument == kSharedMemory ? "__shared__" : "__global__",
             *kind = one.access == kRead ? "read" : one.access == kWrite ? "write" : "atomic";
  return std::string("memcheck: Invalid ") + space + " " + kind + " of size " + std::to_string(one.size) + ": " +
      in_kernel + who + " " + verb(one.access) + " " + bounds(one);
}

void report_findings() {
  for (const Finding& one : found) {
    const std::string more =
        one.count == 1 ? "" : " (the first of " + std::to_string(one.count) + " of this launch)";
    fprintf(stderr, "CUDA emulator: %s%s\n", message(one).c_str(), more.c_str());
  }
  if (!found.empty() && facts->error == 0 && !facts->continues) {
    facts->error = kLaunchFailed;
  }
}

// --- checks ----------------------------------------------------------------------------------------------------------

// Returns the number of the last range that begins at or before an address; `memory_count` if there is none.
uint64_t range_before(uint64_t address) {
  uint64_t first = 0, last = facts->memory_count;
  while (first < last) {
    const uint64_t middle = (first + last) / 2;
    facts->memory[middle].begin <= address ? void(first = middle + 1) : void(last = middle);
  }
  return first == 0 ? facts->memory_count : first - 1;
}

[[noreturn]] __attribute__((noinline)) void out_of_bounds(uint64_t address, uint64_t size, Access access) {
  // The range that is next to the address.
  constexpr uint64_t kNear = 1 << 20;
  uint64_t nearest = facts->memory_count, distance = kNear;
  for (uint64_t i = 0; i < facts->memory_count; ++i) {
    const KernelRange& one = facts->memory[i];
    const uint64_t away = address < one.begin ? one.begin - address : address < one.end ? 0 : address - one.end;
    if (away < distance) {
      nearest = i;
      distance = away;
    }
  }
  const bool is_known = nearest < facts->memory_count;
  if (Finding* noted = note(is_known ? kOutOfBounds : kStray, is_known ? nearest : kNoArgument)) {
    noted->access = access;
    noted->size = size;
    noted->offset = static_cast<int64_t>(address);
    if (is_known) {
      const KernelRange& one = facts->memory[nearest];
      noted->offset = static_cast<int64_t>(address - one.pointer);
      noted->begin = static_cast<int64_t>(one.begin - one.pointer);
      noted->end = static_cast<int64_t>(one.end - one.pointer);
    }
  }
  stop_after_finding(kIllegalAddress);
}

[[noreturn]] __attribute__((noinline)) void out_of_shared(int64_t offset, uint64_t bytes, uint64_t size, Access access) {
  if (Finding* noted = note(kStray, kSharedMemory)) {
    noted->access = access;
    noted->offset = offset;
    noted->size = size;
    noted->end = static_cast<int64_t>(bytes);
  }
  stop_after_finding(kIllegalAddress);
}

void check_alignment(uint64_t address, uint64_t size) {
  if (size <= 16 && (size & (size - 1)) == 0 && (address & (size - 1)) != 0) {
    fprintf(
        stderr, "CUDA emulator: memcheck: Misaligned access of size %lu: kernel %s: %s accesses address %#lx\n", size,
        facts->name, place(item, group).c_str(), address);
    stop_after_finding(kMisalignedAddress);
  }
}

// Returns the cells of memory in the arena or in the image; null for other memory.
Cell* cells_of(uint64_t address) {
  const uint64_t offset = address - facts->arena;
  if (offset < facts->arena_bytes) {
    if (shadow == nullptr) {
      shadow = reserve_cells(facts->arena_bytes);
      shadow_begin = facts->arena;
    }
    return shadow == nullptr ? nullptr : shadow + offset;
  }
  if (address - facts->image >= facts->image_bytes) {
    return nullptr;
  }
  std::vector<Cell>& of_image = image_shadows[facts->image];
  of_image.resize(facts->image_bytes);
  return of_image.data() + (address - facts->image);
}

template <Access access>
void check_shared(uint64_t offset, uint64_t shadow_offset, uint64_t size) {
  shared_shadow.resize(std::max<size_t>(shared_shadow.size(), shadow_offset + size));
  enter_all<access>(
      shared_shadow.data() + shadow_offset, size, group_run, local_epoch, kLocalRace, kSharedMemory,
      static_cast<int64_t>(offset));
}

// Whether an access is to a range, which becomes the recent one.
bool is_in_range(uint64_t address, uint64_t size) {
  const auto contains = [&](uint64_t number) {
    return number < facts->memory_count && address >= facts->memory[number].begin &&
        address + size <= facts->memory[number].end;
  };
  if (!contains(recent_range)) {
    recent_range = range_before(address);
  }
  return contains(recent_range);
}

// Whether an address is behind the shared memory of the image, and a variable is the last of what is there.
bool is_behind_variable(uint64_t address) {
  const uint64_t number = range_before(address), end = launch.kernel->local_end;
  return number < facts->memory_count && facts->memory[number].end == end && address - end < kLocalGuard;
}

template <Access access>
void check(uint64_t address, uint64_t size) {
  if (size == 0 || is_own(address)) {
    return;
  }
  if (is_in_range(address, size)) {
    const uint64_t offset = address - facts->arena;
    const bool is_allowed = offset >= facts->arena_bytes ||
        (facts->owners[offset >> 9] & facts->owners[(offset + size - 1) >> 9] & facts->mask) != 0;
    if (!is_allowed) {
      out_of_bounds(address, size, access);
    }
    check_alignment(address, size);
    if (Cell* cells = cells_of(address)) {
      enter_all<access>(
          cells, size, launch_number, global_epoch, kRace, recent_range,
          static_cast<int64_t>(address - facts->memory[recent_range].pointer));
    }
    return;
  }
  const Kernel& kernel = *launch.kernel;
  const uint64_t fixed = kernel.local_end - kernel.local_begin;
  if (address >= kernel.local_begin && address + size <= kernel.local_end) {
    check_shared<access>(address - kernel.local_begin, address - kernel.local_begin, size);
  } else if (address >= facts->dynamic && address + size <= facts->dynamic + facts->dynamic_bytes) {
    check_shared<access>(address - facts->dynamic, fixed + address - facts->dynamic, size);
  } else if (address >= facts->image && address + size <= kernel.local_begin - kLocalGuard) {
    return; // a constant
  } else if (is_behind_variable(address)) {
    out_of_bounds(address, size, access);
  } else if (address >= kernel.local_begin - kLocalGuard && address < facts->dynamic + kDynamicBytes) {
    const bool is_dynamic = address >= facts->dynamic && facts->dynamic_bytes != 0;
    const uint64_t begin = is_dynamic ? facts->dynamic : kernel.local_begin;
    out_of_shared(static_cast<int64_t>(address - begin), is_dynamic ? facts->dynamic_bytes : fixed, size, access);
  } else {
    out_of_bounds(address, size, access);
  }
}

} // namespace
} // namespace observer
