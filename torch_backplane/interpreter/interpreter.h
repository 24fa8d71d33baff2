// What the interpreter (runtime.cpp) and an observer share: the launch, who runs, device memory; and what an observer is.
//
// An observer is a header that runtime.cpp includes. It has these functions in the namespace `observer`, and functions of
// its own that Python calls:
//
//   Operands operands_of(const Argument*, uint64_t count)  before a launch, outside of its lock: may call Python
//   int run(Operands)              of a launch: calls run_group() for the groups that are to run; the launch's status
//   void group_begins()
//   void item_begins()             a work item begins, or goes on behind a barrier or a shuffle; `item` and `group` say which
//   void item_stops()              it ended, or waits at a barrier or in a shuffle
//   void exchange_ends()           all items of the group stopped, and some go on with what a shuffle gave them
//   void phase_ends(bool diverges, uint32_t ended)   all items of the group stopped; if it diverges `ended` ended while
//                                  others wait at the barrier `barrier_flags`
//   touch<Access>(address, size, instruction)        before an access to memory; end_item() keeps it from happening
//   void transferred(uint64_t bytes)                 read and written by a copy or a fill
//   bool allocated(address, bytes)                   a segment: as many bytes as were asked for; whether it can be used
//   void freed(address, bytes)                       all bytes that it had

#pragma once

#include <cstdint>
#include <mutex>

namespace {  // all of it is one translation unit, and a process may load the libraries of several observers

constexpr uint64_t kLocal = 1, kGlobal = 2;  // memory that a barrier orders: CLK_LOCAL_MEM_FENCE, CLK_GLOBAL_MEM_FENCE

struct Argument {  // memory, or `bytes` of a number; docs/write-a-driver.md has the same
  char* memory;
  uint64_t offset;
  void* data;
  uint64_t bytes;
};

struct Kernel {  // library.py has the same
  void (*run)(const Argument* arguments);
  uint64_t has_barriers;
  uint64_t number;
  uint64_t image_begin;  // its library: constants, and its local memory
  uint64_t local_begin, local_end;
};

struct Launch {
  const Kernel* kernel;
  const Argument* arguments;
  uint64_t items[3], group[3], groups[3];  // work items, those of a group, and groups in each dimension
  uint64_t group_items, group_count;
};

enum Access : uint16_t { kNone, kRead, kWrite, kSwap };

// One launch, copy or fill at a time.
std::mutex launching;
Launch launch;
uint64_t group = 0;
uint32_t item = 0;  // in its group
uint32_t barrier_flags = 0;
uint64_t stack_end = 0;  // where the item's stack began

void run_group(uint64_t number);
[[noreturn]] void end_item();

// Whether an address is of the item's own stack; from a function that its kernel calls.
inline __attribute__((always_inline)) bool is_own(uint64_t address) {
  const auto frame = reinterpret_cast<uint64_t>(__builtin_frame_address(0));
  return address - frame < stack_end - frame;
}

constexpr uint64_t kArena = uint64_t{1} << 38;  // of addresses
constexpr uint64_t kPage = 2 << 20;             // segments are multiples of it, with one that cannot be touched between
char* arena = nullptr;

inline bool in_arena(uint64_t address) {
  return address - reinterpret_cast<uint64_t>(arena) < kArena;
}

// The segment that begins at or before an address: where, and how large; 0 where there is none.
uint64_t segment_before(uint64_t address, uint64_t* bytes);

}  // namespace
