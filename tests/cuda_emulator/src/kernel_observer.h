// The observer of the kernel interpreter (torch_backplane/interpreter/interpreter.h): checks each memory access of a
// kernel, and ends a kernel that makes an illegal one.

#pragma once

#include <cstdint>
#include <cstdio>

#include "interpreter.h"
#include "kernel_checks.h"
#include "kernel_launch.h"

namespace observer {
namespace {

using Operands = KernelLaunchFacts*;

Operands operands_of(const Argument* given, uint64_t count) {
  return static_cast<KernelLaunchFacts*>(given[count - 1].data);
}

int run(Operands given) {
  facts = given;
  const bool can_check = check_begins();
  if (facts->checks && !can_check) {
    return kLaunchFailed;
  }
  for (uint64_t number = 0; number < launch.group_count && facts->error == 0; ++number) {
    run_group(number);
  }
  if (facts->checks) {
    report_findings();
  }
  return facts->error;
}

bool is_elsewhere(uint64_t address, uint64_t size) {
  for (uint64_t i = 0; i < facts->range_count; ++i) {
    if (address >= facts->ranges[i].first && address + size <= facts->ranges[i].second) {
      return true;
    }
  }
  return false;
}

[[noreturn]] __attribute__((noinline)) void refuse(uint64_t address, uint64_t size, int error) {
  if (facts->reports && facts->error == 0) {
    fprintf(
        stderr, "CUDA emulator: kernel %s, block %lu, thread %u: %s access of %lu bytes at %#lx\n", facts->name, group,
        item, error == kIllegalAddress ? "illegal" : "misaligned", size, address);
  }
  stop(error);
}

template <Access access>
inline __attribute__((always_inline)) void touch(uint64_t address, uint64_t size, uint64_t) {
  if (facts->checks) {
    check<access>(address, size);
    return;
  }
  const uint64_t offset = address - facts->arena;
  if (offset < facts->arena_bytes) {
    const uint8_t *first = facts->owners + (offset >> 9), *last = facts->owners + ((offset + size - 1) >> 9);
    if ((*first & *last & facts->mask) == 0) {
      refuse(address, size, kIllegalAddress);
    }
    if (size <= 16 && (size & (size - 1)) == 0 && (address & (size - 1)) != 0) {
      refuse(address, size, kMisalignedAddress);
    }
  } else if (address - facts->image >= facts->image_bytes && !is_own(address) && !is_elsewhere(address, size)) {
    refuse(address, size, kIllegalAddress);
  }
}

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
void transferred(uint64_t) {}
bool allocated(uint64_t, uint64_t) {
  return true;
}
void freed(uint64_t, uint64_t) {}

} // namespace
} // namespace observer

extern "C" {

// --- functions for libcuda -------------------------------------------------------------------------------------------

// Forgets accesses to memory that was freed.
void emulator_forget(uint64_t begin, uint64_t bytes) {
  std::lock_guard lock(launching);
  if (observer::shadow != nullptr) {
    observer::forget_cells(observer::shadow + (begin - observer::shadow_begin), bytes);
  }
}

// --- functions for kernels: kernel_words.h declares them -------------------------------------------------------------

void emulator_trap() {
  observer::stop(observer::kLaunchFailed);
}

void emulator_assert(const char* text, const char* file, int line, const char* function) {
  const uint64_t* shape = launch.group;
  fprintf(
      stderr, "%s:%d: %s: block: [%lu,%lu,%lu], thread: [%lu,%lu,%lu] Assertion `%s` failed.\n", file, line, function,
      group % launch.groups[0], group / launch.groups[0] % launch.groups[1],
      group / launch.groups[0] / launch.groups[1], item % shape[0], item / shape[0] % shape[1],
      item / shape[0] / shape[1], text);
  observer::stop(710); // CUDA_ERROR_ASSERT
}
}
