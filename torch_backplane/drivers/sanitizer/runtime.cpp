// What checked kernels call: each access to memory, barriers, swaps; and the launches that run them.
//
// Kernels are compiled with -fsanitize=thread and not linked with its library: the compiler calls a function before each
// access to memory that is not in registers, and these are here. Work items of a group run one after another; where they
// wait for each other at barriers, each has a stack of its own, and they take turns.

#include <link.h>
#include <pthread.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {

// --- what Python sees: runtime.py has the same structures -------------------------------------------------------------

struct Kernel {
  void (*run)(const void* arguments);
  uint64_t has_barriers;
  uint64_t number;
  uint64_t image_begin;  // its library: constants, and, from local_begin on, local memory
  uint64_t local_begin;
  uint64_t image_end;
};

struct Argument {
  char* memory;
  uint64_t offset;
  void* data;
  uint64_t bytes;
};

enum Kind : uint64_t { kOutOfBounds, kRace, kLocalRace, kBarrier, kStray };
enum Access : uint64_t { kRead, kWrite, kSwap };

struct Finding {
  uint64_t kernel;
  uint64_t kind;
  uint64_t access;        // by `item`
  uint64_t other_access;  // of a race
  uint64_t argument;      // the memory it is about; of two with the same memory the first
  int64_t offset;         // bytes, from where the argument points; in local memory from its beginning; else the address
  uint64_t size;          // of the access
  int64_t begin;          // of the argument's memory, from where it points: 0 or less
  int64_t end;
  uint64_t item;  // its number in its group
  uint64_t group;
  uint64_t other_item;
  uint64_t other_group;
  uint64_t count;  // of this kind and argument in the launch
};

// The memory that was asked for, around an address; `fixed`: it stays so until the segment goes.
struct Extent {
  uint64_t begin;
  uint64_t bytes;
  uint64_t fixed;
};
using Resolve = int (*)(uint64_t address, Extent* extent);

// --- device memory ----------------------------------------------------------------------------------------------------

constexpr uint64_t kArena = uint64_t{1} << 37;  // of addresses
constexpr uint64_t kPage = 2 << 20;             // segments are multiples of it, with one that cannot be touched between

struct Segment {
  uint64_t bytes;
  Extent extent;
};

std::mutex memory_mutex;
char* arena = nullptr;
uint64_t arena_used = kPage;
std::map<uint64_t, Segment> segments;                 // by address
std::map<uint64_t, std::vector<uint64_t>> free_slots;  // by bytes
std::atomic<Resolve> resolve{nullptr};

inline bool in_arena(uint64_t address) {
  return address - reinterpret_cast<uint64_t>(arena) < kArena;
}

// --- who touched a byte last ------------------------------------------------------------------------------------------

struct Cell {
  uint32_t run;  // what it says is of this launch (local memory: of this group's run); of another: nothing
  uint32_t writer;
  uint32_t reader;
  uint32_t other;  // another one that reads, if possible of another group
  uint16_t write_epoch;
  uint16_t read_epoch;
  uint16_t other_epoch;
  uint16_t flags;
};

constexpr uint16_t kHasWriter = 1, kHasReader = 2, kHasOther = 4, kReaderSwaps = 8, kOtherSwaps = 16;

Cell* shadow = nullptr;  // of the arena
std::vector<Cell> local_shadow;

// --- state: one launch at a time --------------------------------------------------------------------------------------

struct Operand {
  uint64_t begin, end;  // of its memory
  uint64_t pointer;     // where the argument points
  uint64_t argument;
  uint64_t slot_begin, slot_end;  // its segment, and what cannot be touched around it
};

std::mutex launching;
const Kernel* kernel = nullptr;
std::vector<Operand> operands;
size_t recent = 0;  // of operands
std::vector<Finding> found;     // in this launch
std::vector<Finding> findings;  // in all, until Python takes them
std::mutex findings_mutex;
std::atomic<uint64_t> launches{0};
std::atomic<uint64_t> accesses{0};
uint64_t launch_accesses = 0;
bool raises = true;

uint32_t launch_number = 0, group_run = 0;
uint32_t item = 0;  // of all items of the launch, group after group
uint32_t group_items = 1;
uint32_t group = 0;
uint16_t global_epoch = 0, local_epoch = 0;
uint32_t barrier_flags = 0;
bool unordered = false;  // what the item writes now may be overwritten by others that say so, too
uint64_t place[18];  // get_global_id, get_local_id, get_group_id, get_global_size, get_local_size, get_num_groups
uint64_t stack_begin = 0, stack_end = 0;

jmp_buf scheduler;  // where an item goes that waits, or that ends before its time

struct Fiber {
  jmp_buf at;
  ucontext_t context;
  char* stack;
  uint32_t item;
  bool started = false, alive = false;
};
Fiber* running = nullptr;

[[noreturn]] void end_item() {
  if (running != nullptr) {
    running->alive = running->started = false;
  }
  _longjmp(scheduler, 2);
}

Finding* note(Kind kind, uint64_t argument) {
  for (Finding& one : found) {
    if (one.kind == kind && one.argument == argument) {
      ++one.count;
      return nullptr;
    }
  }
  Finding one{};
  one.kernel = kernel->number;
  one.kind = kind;
  one.argument = argument;
  one.item = item % group_items;
  one.group = group;
  one.count = 1;
  found.push_back(one);
  return &found.back();
}

// --- checks -----------------------------------------------------------------------------------------------------------

struct Conflict {
  uint32_t other;
  Access access;
};

inline bool meets(uint32_t other, uint16_t other_epoch, uint16_t epoch) {
  return other != item && (other_epoch == epoch || other / group_items != group);
}

// Whether an access races with one before it; notes it.
template <Access access>
inline bool enter(Cell& cell, uint32_t run, uint16_t epoch, Conflict* conflict) {
  if (cell.run != run) {
    cell.run = run;
    cell.flags = 0;
  }
  bool is_race = false;
  if ((cell.flags & kHasWriter) != 0 && meets(cell.writer, cell.write_epoch, epoch)) {
    *conflict = {cell.writer, kWrite};
    is_race = true;
  }
  if (access == kWrite) {
    if ((cell.flags & kHasReader) != 0 && meets(cell.reader, cell.read_epoch, epoch)) {
      *conflict = {cell.reader, (cell.flags & kReaderSwaps) != 0 ? kSwap : kRead};
      is_race = true;
    } else if ((cell.flags & kHasOther) != 0 && meets(cell.other, cell.other_epoch, epoch)) {
      *conflict = {cell.other, (cell.flags & kOtherSwaps) != 0 ? kSwap : kRead};
      is_race = true;
    }
    cell.writer = item;
    cell.write_epoch = epoch;
    cell.flags = kHasWriter;
    return is_race;
  }
  if ((cell.flags & kHasReader) != 0 && cell.reader != item) {
    const bool apart = cell.reader / group_items != group;
    if (apart || (cell.flags & kHasOther) == 0 || cell.other / group_items == group) {
      cell.other = cell.reader;
      cell.other_epoch = cell.read_epoch;
      cell.flags = static_cast<uint16_t>(
          (cell.flags & ~kOtherSwaps) | kHasOther | ((cell.flags & kReaderSwaps) != 0 ? kOtherSwaps : 0));
    }
  }
  cell.reader = item;
  cell.read_epoch = epoch;
  cell.flags = static_cast<uint16_t>((cell.flags & ~kReaderSwaps) | kHasReader | (access == kSwap ? kReaderSwaps : 0));
  return is_race;
}

template <Access access>
inline void enter_all(
    Cell* cells, uint64_t size, uint32_t run, uint16_t epoch, Kind kind, uint64_t argument, int64_t offset) {
  for (uint64_t i = 0; i < size; ++i) {
    Conflict conflict;
    if (__builtin_expect(enter<access>(cells[i], run, epoch, &conflict), 0)) {
      if (Finding* one = note(kind, argument)) {
        one->access = access;
        one->other_access = conflict.access;
        one->offset = offset + static_cast<int64_t>(i);
        one->size = size;
        one->other_item = conflict.other % group_items;
        one->other_group = conflict.other / group_items;
      }
      // The other bytes of the access belong to the same pair.
      for (++i; i < size; ++i) {
        enter<access>(cells[i], run, epoch, &conflict);
      }
    }
  }
}

[[noreturn]] void out_of_bounds(uint64_t address, uint64_t size, Access access) {
  // Whose memory ends, or begins, next to it.
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
inline void touch(uint64_t address, uint64_t size) {
  if (kernel == nullptr || size == 0) {
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
  if (address >= kernel->local_begin && address + size <= kernel->image_end) {
    const uint64_t offset = address - kernel->local_begin;
    enter_all<access>(
        local_shadow.data() + offset, size, group_run, local_epoch, kLocalRace, ~uint64_t{0},
        static_cast<int64_t>(offset));
    return;
  }
  if ((address >= stack_begin && address < stack_end) || (address >= kernel->image_begin && address < kernel->image_end)) {
    return;  // the item's own, or a constant
  }
  out_of_bounds(address, size, access);
}

// --- work items that take turns -------------------------------------------------------------------------------------

constexpr size_t kStack = 256 << 10;
std::vector<Fiber*> fibers;
const Argument* arguments = nullptr;
char* stacks = nullptr;
constexpr size_t kMostFibers = 1 << 16;

void fiber_main() {
  kernel->run(arguments);
  end_item();
}

Fiber* make_fiber() {
  if (stacks == nullptr) {
    void* reserved = mmap(
        nullptr, kMostFibers * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks = static_cast<char*>(reserved);
  }
  auto* fiber = new Fiber;
  fiber->stack = stacks + fibers.size() * kStack;
  return fiber;
}

void start(Fiber* fiber) {
  fiber->started = true;
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack;
  fiber->context.uc_stack.ss_size = kStack;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, fiber_main, 0);
  setcontext(&fiber->context);
}

void resume(Fiber* fiber) {
  running = fiber;
  if (_setjmp(scheduler) == 0) {
    if (fiber->started) {
      _longjmp(fiber->at, 1);
    }
    start(fiber);
  }
  running = nullptr;
}

// --- launches ---------------------------------------------------------------------------------------------------------

struct Sizes {
  uint64_t items[3], group[3], groups[3];
};

void set_place(const Sizes& sizes, uint64_t local) {
  unordered = false;
  item = static_cast<uint32_t>(group * uint64_t{group_items} + local);
  const uint64_t at[3] = {
      local % sizes.group[0], local / sizes.group[0] % sizes.group[1], local / sizes.group[0] / sizes.group[1]};
  for (int d = 0; d < 3; ++d) {
    place[d] = place[6 + d] * sizes.group[d] + at[d];
    place[3 + d] = at[d];
  }
}

void run_group(const Sizes& sizes) {
  ++group_run;
  global_epoch = local_epoch = 0;
  const uint64_t number[3] = {
      group % sizes.groups[0], group / sizes.groups[0] % sizes.groups[1], group / sizes.groups[0] / sizes.groups[1]};
  for (int d = 0; d < 3; ++d) {
    place[6 + d] = number[d];
  }
  if (kernel->has_barriers == 0) {
    for (uint64_t i = 0; i < group_items; ++i) {
      set_place(sizes, i);
      if (_setjmp(scheduler) == 0) {
        kernel->run(arguments);
      }
    }
    return;
  }
  for (uint64_t i = 0; i < group_items; ++i) {
    fibers[i]->alive = true;
    fibers[i]->started = false;
  }
  const size_t noted = found.size();
  for (uint64_t alive = group_items; alive > 0;) {
    const uint64_t before = alive;
    barrier_flags = 0;
    uint32_t ended = ~0u;
    for (uint64_t i = 0; i < group_items; ++i) {
      if (fibers[i]->alive) {
        set_place(sizes, i);
        resume(fibers[i]);
        if (!fibers[i]->alive) {
          --alive;
          ended = item;
        }
      }
    }
    if (alive != 0 && alive != before && found.size() == noted) {
      item = ended;
      note(kBarrier, ~uint64_t{0});
    }
    local_epoch = static_cast<uint16_t>(local_epoch + (barrier_flags & 1));
    global_epoch = static_cast<uint16_t>(global_epoch + (barrier_flags >> 1 & 1));
  }
}

void find_stack() {
  pthread_attr_t attributes;
  void* begin = nullptr;
  size_t size = 0;
  if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
    pthread_attr_getstack(&attributes, &begin, &size);
    pthread_attr_destroy(&attributes);
  }
  stack_begin = reinterpret_cast<uint64_t>(begin);
  stack_end = stack_begin + size;
}

struct Search {
  uint64_t address;
  uint64_t* range;
};

int look_at_image(dl_phdr_info* info, size_t, void* data) {
  auto* search = static_cast<Search*>(data);
  uint64_t begin = ~uint64_t{0}, end = 0, local = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type == PT_LOAD) {
      const uint64_t at = info->dlpi_addr + header.p_vaddr;
      begin = std::min(begin, at);
      end = std::max(end, at + header.p_memsz);
      if ((header.p_flags & PF_W) != 0) {
        local = at + header.p_filesz;
      }
    }
  }
  if (search->address < begin || search->address >= end) {
    return 0;
  }
  search->range[0] = begin;
  search->range[1] = local != 0 ? local : end;
  search->range[2] = end;
  return 1;
}

}  // namespace

extern "C" {

void* backplane_sanitizer_allocate(uint64_t bytes) {
  std::lock_guard lock(memory_mutex);
  if (arena == nullptr) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* reserved = mmap(nullptr, kArena, PROT_NONE, kFlags, -1, 0);
    void* cells = mmap(nullptr, kArena * sizeof(Cell), PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (reserved == MAP_FAILED || cells == MAP_FAILED) {
      return nullptr;
    }
    arena = static_cast<char*>(reserved);
    shadow = static_cast<Cell*>(cells);
  }
  const uint64_t size = (bytes + kPage - 1) / kPage * kPage;
  uint64_t address = 0;
  std::vector<uint64_t>& slots = free_slots[size];
  if (!slots.empty()) {
    address = slots.back();
    slots.pop_back();
  } else {
    if (arena_used + size + kPage > kArena) {
      return nullptr;
    }
    address = reinterpret_cast<uint64_t>(arena) + arena_used;
    arena_used += size + kPage;
  }
  if (mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE) != 0) {
    slots.push_back(address);
    return nullptr;
  }
  segments[address] = {size, {address, bytes, 0}};
  return reinterpret_cast<void*>(address);
}

void backplane_sanitizer_free(void* memory) {
  std::lock_guard lock(memory_mutex);
  const auto entry = segments.find(reinterpret_cast<uint64_t>(memory));
  const uint64_t size = entry->second.bytes;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  mmap(memory, size, PROT_NONE, kFlags, -1, 0);
  madvise(shadow + (static_cast<char*>(memory) - arena), size * sizeof(Cell), MADV_DONTNEED);
  free_slots[size].push_back(entry->first);
  segments.erase(entry);
}

void backplane_sanitizer_configure(Resolve function, uint64_t raising) {
  resolve = function;
  raises = raising != 0;
}

// The library that holds the address of a function: where it begins, its local memory begins, and it ends.
void backplane_sanitizer_image(void* function, uint64_t* range) {
  Search search{reinterpret_cast<uint64_t>(function), range};
  dl_iterate_phdr(look_at_image, &search);
}

// How many findings there are; writes `most` of them at most, and forgets all where that is not 0.
uint64_t backplane_sanitizer_take(Finding* out, uint64_t most) {
  std::lock_guard lock(findings_mutex);
  const uint64_t count = findings.size();
  if (most != 0) {
    std::copy_n(findings.begin(), std::min(count, most), out);
    findings.clear();
  }
  return count;
}

uint64_t backplane_sanitizer_count(uint64_t which) {
  return which == 0 ? launches.load() : which == 1 ? accesses.load() : which == 2 ? sizeof(Kernel) : sizeof(Finding);
}

int backplane_sanitizer_launch(
    void*, const Kernel* wanted, const uint64_t* items, const uint64_t* of_group, const Argument* given, uint64_t count) {
  // Python may be asked, so before the lock.
  std::vector<Operand> given_memory;
  for (uint64_t i = 0; i < count; ++i) {
    if (given[i].bytes != 0 || given[i].memory == nullptr) {
      continue;
    }
    const uint64_t pointer = reinterpret_cast<uint64_t>(given[i].memory) + given[i].offset;
    Extent extent;
    uint64_t slot = 0, slot_bytes = 0;
    {
      std::lock_guard lock(memory_mutex);
      auto entry = segments.upper_bound(pointer);
      if (entry == segments.begin()) {
        continue;
      }
      --entry;
      slot = entry->first;
      slot_bytes = entry->second.bytes;
      extent = entry->second.extent;
    }
    if (const Resolve ask = resolve.load(); extent.fixed == 0 && ask != nullptr && ask(pointer, &extent) != 0) {
      if (extent.fixed != 0) {
        std::lock_guard lock(memory_mutex);
        if (const auto entry = segments.find(slot); entry != segments.end()) {
          entry->second.extent = extent;
        }
      }
    }
    const bool is_known = std::any_of(given_memory.begin(), given_memory.end(), [&](const Operand& one) {
      return one.begin == extent.begin;
    });
    if (!is_known) {
      given_memory.push_back(
          {extent.begin, extent.begin + extent.bytes, pointer, i, slot - kPage / 2, slot + slot_bytes + kPage / 2});
    }
  }
  std::lock_guard lock(launching);
  operands = std::move(given_memory);
  recent = 0;
  found.clear();
  arguments = given;
  ++launch_number;
  launch_accesses = 0;
  Sizes sizes;
  uint64_t groups = 1;
  group_items = 1;
  for (int d = 0; d < 3; ++d) {
    sizes.items[d] = items[d];
    sizes.group[d] = of_group[d];
    sizes.groups[d] = items[d] / of_group[d];
    groups *= sizes.groups[d];
    group_items *= static_cast<uint32_t>(of_group[d]);
    place[9 + d] = items[d];
    place[12 + d] = of_group[d];
    place[15 + d] = sizes.groups[d];
  }
  if (groups * group_items > ~uint32_t{0} || group_items > kMostFibers) {
    return -1;
  }
  local_shadow.resize(std::max<size_t>(local_shadow.size(), wanted->image_end - wanted->local_begin));
  if (wanted->has_barriers != 0) {
    while (fibers.size() < group_items) {
      fibers.push_back(make_fiber());
    }
    stack_begin = reinterpret_cast<uint64_t>(stacks);
    stack_end = stack_begin + kMostFibers * kStack;
  } else {
    find_stack();
  }
  kernel = wanted;
  for (uint64_t i = 0; i < groups; ++i) {
    group = static_cast<uint32_t>(i);
    run_group(sizes);
  }
  kernel = nullptr;
  ++launches;
  accesses += launch_accesses;
  if (found.empty()) {
    return 0;
  }
  std::lock_guard findings_lock(findings_mutex);
  findings.insert(findings.end(), found.begin(), found.end());
  return raises ? 1 : 0;
}

int backplane_sanitizer_copy(void*, char* to, uint64_t to_offset, char* from, uint64_t from_offset, uint64_t bytes) {
  std::lock_guard lock(launching);
  memmove(to + to_offset, from + from_offset, bytes);
  return 0;
}

int backplane_sanitizer_fill(void*, char* memory, uint64_t offset, uint64_t bytes, int value) {
  std::lock_guard lock(launching);
  memset(memory + offset, value, bytes);
  return 0;
}

int backplane_sanitizer_flush(void*) {
  return 0;
}

// --- what the text of kernels calls -----------------------------------------------------------------------------------

uint64_t backplane_sanitizer_place(uint32_t which) {
  return place[which];
}

void backplane_sanitizer_barrier(uint32_t flags) {
  barrier_flags = flags;
  if (_setjmp(running->at) == 0) {
    _longjmp(scheduler, 1);
  }
}

void backplane_sanitizer_range(uint64_t address, uint64_t bytes, uint32_t writes) {
  writes != 0 ? touch<kWrite>(address, bytes) : touch<kRead>(address, bytes);
}

void backplane_sanitizer_unordered(uint32_t begins) {
  unordered = begins != 0;
}

uint32_t backplane_sanitizer_swap(uint64_t address, uint32_t expected, uint32_t desired) {
  touch<kSwap>(address, 4);
  auto* at = reinterpret_cast<uint32_t*>(address);
  const uint32_t old = *at;
  if (old == expected) {
    *at = desired;
  }
  return old;
}

// --- what compilers call for -fsanitize=thread -----------------------------------------------------------------------

#define ACCESS(name, size, access)                                                                \
  void __tsan_##name(void* at) {                                                                  \
    access == kWrite && unordered ? touch<kSwap>(reinterpret_cast<uint64_t>(at), size)            \
                                  : touch<access>(reinterpret_cast<uint64_t>(at), size);          \
  }
#define ACCESSES(size)                        \
  ACCESS(read##size, size, kRead)             \
  ACCESS(write##size, size, kWrite)           \
  ACCESS(unaligned_read##size, size, kRead)   \
  ACCESS(unaligned_write##size, size, kWrite) \
  ACCESS(volatile_read##size, size, kRead)    \
  ACCESS(volatile_write##size, size, kWrite)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

void* __tsan_memcpy(void* to, const void* from, uint64_t bytes) {
  touch<kRead>(reinterpret_cast<uint64_t>(from), bytes);
  touch<kWrite>(reinterpret_cast<uint64_t>(to), bytes);
  return memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, uint64_t bytes) {
  touch<kRead>(reinterpret_cast<uint64_t>(from), bytes);
  touch<kWrite>(reinterpret_cast<uint64_t>(to), bytes);
  return memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, uint64_t bytes) {
  touch<kWrite>(reinterpret_cast<uint64_t>(to), bytes);
  return memset(to, value, bytes);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
