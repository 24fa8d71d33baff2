// Runs kernels on the host, one work item after another, and calls an observer before each memory access.
//
// Kernels are compiled with -fsanitize=thread, but not linked with its library: the compiler inserts a function call
// before each memory access, and this file defines these functions. If a kernel has barriers or shuffles, each work
// item of the group has its own stack, and the items take turns.

#include <dlfcn.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "interpreter.h"
#include OBSERVER

namespace {

uint64_t place[18];  // get_global_id, get_local_id, get_group_id, get_global_size, get_local_size, get_num_groups
bool unordered = false;  // in ANY_MAY_STAY: racing stores are allowed if all of them are marked so

// --- device memory ---------------------------------------------------------------------------------------------------

constexpr int kAnonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

std::mutex memory_mutex;
uint64_t arena_used = kPage;
std::map<uint64_t, uint64_t> segments;                 // address → size
std::map<uint64_t, std::vector<uint64_t>> free_slots;  // size → addresses

// --- work items with their own stacks --------------------------------------------------------------------------------

struct Copy {  // of 16 bytes to `to`: the first `bytes` are at `from`, the others are 0
  char* to;
  const char* from;
  uint32_t bytes;
};

constexpr uint32_t kMaxGiven = 4;

struct Fiber {
  jmp_buf at;
  ucontext_t context;
  char* stack;
  size_t stack_bytes;
  bool started = false, alive = false;
  bool at_barrier = false, in_shuffle = false, in_subgroup_barrier = false;
  uint64_t value = 0, result = 0;  // of a shuffle
  uint32_t lane = 0;               // whose value it gets
  uint64_t mask = 0;               // the lanes that must be in the shuffle; see kWholeSubgroup
  uint64_t given[2][kMaxGiven] = {};  // of interpreter_shuffle_all, alternately
  uint64_t exchanges = 0;             // calls of interpreter_shuffle_all
  std::vector<Copy> copies;  // that it has begun
};

// All lanes, also those of work items that have ended. A mask of 32 bits leaves those out.
constexpr uint64_t kWholeSubgroup = ~uint64_t{0};

constexpr size_t kStack = 256 << 10;
std::vector<Fiber*> fibers;
Fiber* running = nullptr;
jmp_buf scheduler;  // an item jumps here to wait, and in end_item()

void wait() {
  if (_setjmp(running->at) == 0) {
    _longjmp(scheduler, 1);
  }
}

void fiber_main() {
  for (;;) {
    launch.kernel->run(launch.arguments);
    running->alive = false;
    wait();
  }
}

Fiber* make_fiber() {
  auto* fiber = new Fiber;
  // The beginnings of the stacks are in different cache sets.
  fiber->stack_bytes = kStack - fibers.size() * 448 % (64 << 10) / 64 * 64;
  fiber->stack = static_cast<char*>(mmap(nullptr, kStack, PROT_READ | PROT_WRITE, kAnonymous, -1, 0));
  return fiber;
}

void resume(Fiber* fiber) {
  running = fiber;
  stack_end = reinterpret_cast<uint64_t>(fiber->stack + fiber->stack_bytes);
  if (_setjmp(scheduler) == 0) {
    if (fiber->started) {
      _longjmp(fiber->at, 1);
    }
    fiber->started = true;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = fiber->stack_bytes;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, fiber_main, 0);
    setcontext(&fiber->context);
  }
  running = nullptr;
}

// Completes the shuffles of all subgroups. Returns whether any item is in a shuffle. If others of its subgroup that must
// be in it are not, sets `diverges`, and `absent` to one of them.
bool exchange(bool* diverges, uint32_t* absent) {
  bool any = false;
  for (uint32_t begin = 0; begin < launch.group_items; begin += kSubgroup) {
    const uint32_t end = std::min<uint64_t>(begin + kSubgroup, launch.group_items);
    const auto is_absent = [](uint32_t i) { return !fibers[i]->in_shuffle; };
    uint64_t mask = 0;
    bool present = false, meets = false;
    for (uint32_t i = begin; i < end; ++i) {
      Fiber* fiber = fibers[i];
      const uint32_t from = fiber->lane < kSubgroup ? begin + fiber->lane : end;
      if (fiber->in_shuffle) {
        present = true;
        meets = meets || fiber->in_subgroup_barrier;
        mask |= fiber->mask;
        fiber->result = from < end && !is_absent(from) ? fibers[from]->value : fiber->value;
      }
    }
    for (uint32_t i = begin; present && i < end; ++i) {
      const bool is_needed = (mask >> (i - begin) & 1) != 0 && (fibers[i]->alive || mask == kWholeSubgroup);
      if (is_absent(i) && is_needed) {
        *diverges = true;
        *absent = i;
      }
    }
    for (uint32_t i = begin; present && i < end; ++i) {
      fibers[i]->in_shuffle = fibers[i]->in_subgroup_barrier = false;
    }
    if (meets) {
      observer::subgroup_meets(begin / kSubgroup);
    }
    any = any || present;
  }
  return any;
}

void begin_item() {
  unordered = false;
  const uint64_t at[3] = {
      item % launch.group[0], item / launch.group[0] % launch.group[1], item / launch.group[0] / launch.group[1]};
  for (int d = 0; d < 3; ++d) {
    place[d] = place[6 + d] * launch.group[d] + at[d];
    place[3 + d] = at[d];
  }
  observer::item_begins();
}

template <Access access>
inline __attribute__((always_inline)) void touch(const void* at, uint64_t size, void* instruction) {
  observer::touch<access>(reinterpret_cast<uint64_t>(at), size, reinterpret_cast<uint64_t>(instruction));
}

// --- functions for observers -----------------------------------------------------------------------------------------

[[maybe_unused]] void end_item() {
  if (running != nullptr) {
    running->alive = running->started = false;
  }
  _longjmp(scheduler, 2);
}

void run_group(uint64_t number) {
  group = number;
  const uint64_t* groups = launch.groups;
  const uint64_t at[3] = {number % groups[0], number / groups[0] % groups[1], number / groups[0] / groups[1]};
  std::copy(std::begin(at), std::end(at), place + 6);
  observer::group_begins();
  if (launch.kernel->has_barriers == 0) {
    stack_end = reinterpret_cast<uint64_t>(__builtin_frame_address(0));
    for (item = 0; item < launch.group_items; ++item) {
      begin_item();
      if (_setjmp(scheduler) == 0) {
        launch.kernel->run(launch.arguments);
      }
      observer::item_stops();
    }
    observer::phase_ends(false, 0);
    return;
  }
  for (uint64_t i = 0; i < launch.group_items; ++i) {
    fibers[i]->alive = true;
    fibers[i]->exchanges = 0;
    fibers[i]->copies.clear();
  }
  for (uint64_t alive = launch.group_items; alive > 0;) {
    const uint64_t before = alive;
    uint32_t ended = 0;
    bool diverges = false, in_shuffles = true;
    barrier_flags = 0;
    for (uint64_t i = 0; i < launch.group_items; ++i) {
      fibers[i]->at_barrier = false;
    }
    while (in_shuffles) {
      for (item = 0; item < launch.group_items; ++item) {
        Fiber* fiber = fibers[item];
        if (fiber->alive && !fiber->at_barrier) {
          begin_item();
          resume(fiber);
          observer::item_stops();
          if (!fiber->alive) {
            --alive;
            ended = item;
          }
        }
      }
      in_shuffles = exchange(&diverges, &ended);
      if (in_shuffles) {
        observer::exchange_ends();
      }
    }
    observer::phase_ends(diverges || (alive != 0 && alive != before), ended);
  }
}

[[maybe_unused]] uint64_t segment_before(uint64_t address, uint64_t* bytes) {
  std::lock_guard lock(memory_mutex);
  auto entry = segments.upper_bound(address);
  if (entry == segments.begin()) {
    return 0;
  }
  --entry;
  *bytes = entry->second;
  return entry->first;
}

}  // namespace

extern "C" {

// --- functions for Python --------------------------------------------------------------------------------------------

// Allocates device memory. Returns null if that is not possible.
void* interpreter_allocate(uint64_t bytes) {
  std::lock_guard lock(memory_mutex);
  if (arena == nullptr) {
    void* reserved = mmap(nullptr, kArena, PROT_NONE, kAnonymous, -1, 0);
    if (reserved == MAP_FAILED) {
      return nullptr;
    }
    arena = static_cast<char*>(reserved);
  }
  const uint64_t size = (bytes + kPage - 1) / kPage * kPage;
  std::vector<uint64_t>& slots = free_slots[size];
  if (slots.empty()) {
    if (arena_used + size + kPage > kArena) {
      return nullptr;
    }
    slots.push_back(reinterpret_cast<uint64_t>(arena) + arena_used);
    arena_used += size + kPage;
  }
  const uint64_t address = slots.back();
  void* memory = reinterpret_cast<void*>(address);
  if (mprotect(memory, size, PROT_READ | PROT_WRITE) != 0 || !observer::allocated(address, bytes)) {
    return nullptr;
  }
  slots.pop_back();
  segments[address] = size;
  return memory;
}

void interpreter_free(void* memory) {
  std::lock_guard lock(memory_mutex);
  const auto entry = segments.find(reinterpret_cast<uint64_t>(memory));
  mmap(memory, entry->second, PROT_NONE, kAnonymous | MAP_FIXED, -1, 0);
  observer::freed(entry->first, entry->second);
  free_slots[entry->second].push_back(entry->first);
  segments.erase(entry);
}

// Returns the base address of the library that contains this function.
uint64_t interpreter_image(void* function) {
  Dl_info info;
  return dladdr(function, &info) != 0 ? reinterpret_cast<uint64_t>(info.dli_fbase) : 0;
}

// --- the native launcher (API "c", see docs/driver-contract.md) ------------------------------------------------------

int interpreter_launch(
    void*, const Kernel* kernel, const uint64_t* items, const uint64_t* of_group, const Argument* given, uint64_t count) {
  auto operands = observer::operands_of(given, count);
  std::lock_guard lock(launching);
  launch = {kernel, given, {}, {}, {}, 1, 1};
  for (int d = 0; d < 3; ++d) {
    launch.items[d] = place[9 + d] = items[d];
    launch.group[d] = place[12 + d] = of_group[d];
    launch.groups[d] = place[15 + d] = items[d] / of_group[d];
    launch.group_items *= launch.group[d];
    launch.group_count *= launch.groups[d];
  }
  while (kernel->has_barriers != 0 && fibers.size() < launch.group_items) {
    fibers.push_back(make_fiber());
  }
  return observer::run(std::move(operands));
}

int interpreter_copy(void*, char* to, uint64_t to_offset, char* from, uint64_t from_offset, uint64_t bytes) {
  std::lock_guard lock(launching);
  memmove(to + to_offset, from + from_offset, bytes);
  observer::transferred(2 * bytes);
  return 0;
}

int interpreter_fill(void*, char* memory, uint64_t offset, uint64_t bytes, int value) {
  std::lock_guard lock(launching);
  memset(memory + offset, value, bytes);
  observer::transferred(bytes);
  return 0;
}

int interpreter_flush(void*) {
  return 0;
}

// --- functions for kernels: language.py declares them ----------------------------------------------------------------

uint64_t interpreter_place(uint32_t which) {
  return place[which];
}

void interpreter_barrier(uint32_t flags) {
  barrier_flags = flags;
  running->at_barrier = true;
  wait();
}

// Returns the value of a work item of the subgroup, or its own if there is none with this number. The work items in the
// mask must take part, unless they have ended.
uint64_t interpreter_shuffle_from(uint64_t value, uint32_t lane, uint64_t mask) {
  running->value = value;
  running->lane = lane;
  running->mask = mask;
  running->in_shuffle = true;
  wait();
  return running->result;
}

// Returns the value of the work item whose number is higher by `offset`, or its own if there is none in the subgroup.
uint64_t interpreter_shuffle_down(uint64_t value, uint32_t offset) {
  return interpreter_shuffle_from(value, item % kSubgroup + offset, kWholeSubgroup);
}

// Gives `count` values to every work item of the subgroup: those of lane n are all[n * count] and the next ones. Every
// lane takes part, except those that a finding has ended; their values are 0.
void interpreter_shuffle_all(const uint64_t* given, uint32_t count, uint64_t* all) {
  Fiber* self = running;
  // Lanes that resume before others write to their other place.
  const uint64_t number = ++self->exchanges, place = number % 2;
  std::copy(given, given + count, self->given[place]);
  interpreter_shuffle_from(0, 0, kWholeSubgroup);
  const uint64_t first = item - item % kSubgroup, lanes = std::min<uint64_t>(kSubgroup, launch.group_items - first);
  for (uint64_t lane = 0; lane < kSubgroup; ++lane) {
    const Fiber* other = fibers[first + std::min(lane, lanes - 1)];
    if (other->exchanges >= number) {
      std::copy(other->given[place], other->given[place] + count, all + lane * count);
    } else {
      std::fill(all + lane * count, all + (lane + 1) * count, 0);
    }
  }
}

// Copies 16 bytes, of which those behind the first `bytes` are 0. They arrive in interpreter_wait_for_copies.
void interpreter_copy_later(char* to, const char* from, uint32_t bytes) {
  void* instruction = __builtin_return_address(0);
  if (bytes > 0) {
    touch<kRead>(from, bytes, instruction);
  }
  touch<kWrite>(to, 16, instruction);
  running->copies.push_back({to, from, bytes});
}

void interpreter_wait_for_copies() {
  for (const Copy& one : running->copies) {
    memcpy(one.to, one.from, one.bytes);
    memset(one.to + one.bytes, 0, 16 - one.bytes);
  }
  running->copies.clear();
}

// A barrier for the work items of the mask: their memory accesses before it precede those behind it.
void interpreter_shuffle_barrier(uint32_t mask) {
  running->in_subgroup_barrier = true;
  interpreter_shuffle_from(0, 0, mask);
}

// An access that the compiler does not instrument: 0 reads, 1 writes, 2 swaps.
void interpreter_range(void* at, uint64_t bytes, uint32_t how) {
  void* instruction = __builtin_return_address(0);
  how == 0      ? touch<kRead>(at, bytes, instruction)
      : how == 1 ? touch<kWrite>(at, bytes, instruction)
                 : touch<kSwap>(at, bytes, instruction);
}

void interpreter_unordered(uint32_t begins) {
  unordered = begins != 0;
}

uint32_t interpreter_swap(uint32_t* at, uint32_t expected, uint32_t desired) {
  touch<kSwap>(at, 4, __builtin_return_address(0));
  const uint32_t old = *at;
  if (old == expected) {
    *at = desired;
  }
  return old;
}

// Not every processor has float16, so it is converted in software, rounding to nearest even.

float interpreter_from_half(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
  uint32_t made = (magnitude << 13) + (magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u);
  float value = static_cast<float>(magnitude) * 0x1p-24f;
  if (magnitude < 0x400u) {
    memcpy(&made, &value, sizeof made);
  }
  made |= sign;
  memcpy(&value, &made, sizeof value);
  return value;
}

uint16_t interpreter_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x47800000u) {
    return sign | (magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u);
  }
  if (magnitude >= 0x38800000u) {
    return sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
  }
  memcpy(&value, &magnitude, sizeof value);
  value += 0.5f;
  memcpy(&bits, &value, sizeof bits);
  return sign | (bits - 0x3f000000u);
}

// --- functions that compilers call for -fsanitize=thread -------------------------------------------------------------

#define READ(name, size) \
  void __tsan_##name(void* at) { touch<kRead>(at, size, __builtin_return_address(0)); }
#define WRITE(name, size)                                                   \
  void __tsan_##name(void* at) {                                            \
    unordered ? touch<kSwap>(at, size, __builtin_return_address(0))         \
              : touch<kWrite>(at, size, __builtin_return_address(0));       \
  }
#define ACCESSES(size)              \
  READ(read##size, size)            \
  READ(unaligned_read##size, size)  \
  READ(volatile_read##size, size)   \
  WRITE(write##size, size)          \
  WRITE(unaligned_write##size, size) \
  WRITE(volatile_write##size, size)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

void __tsan_read_range(void* at, uint64_t size) {
  touch<kRead>(at, size, __builtin_return_address(0));
}
void __tsan_write_range(void* at, uint64_t size) {
  touch<kWrite>(at, size, __builtin_return_address(0));
}
void* __tsan_memcpy(void* to, const void* from, uint64_t bytes) {
  touch<kRead>(from, bytes, __builtin_return_address(0));
  touch<kWrite>(to, bytes, __builtin_return_address(0));
  return memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, uint64_t bytes) {
  touch<kRead>(from, bytes, __builtin_return_address(0));
  touch<kWrite>(to, bytes, __builtin_return_address(0));
  return memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, uint64_t bytes) {
  touch<kWrite>(to, bytes, __builtin_return_address(0));
  return memset(to, value, bytes);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
