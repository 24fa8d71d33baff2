// Shared by the interpreter (runtime.cpp) and an observer: the launch, the running work item, device memory.
//
// An observer is a header that runtime.cpp includes. It has the following in the namespace `observer`, and functions
// that Python calls:
//
//   Operands operands_of(const Argument*, uint64_t count)
//       Called before a launch, without the lock `launching`, so it can call Python.
//   int run(Operands)
//       Runs a launch: calls run_group() for each group to run. Returns the status of the launch.
//   void group_begins()
//   void item_begins()
//       The work item `item` of `group` starts, or resumes after a barrier or a shuffle.
//   void item_stops()
//       It has ended, or waits at a barrier or in a shuffle.
//   void subgroup_meets(uint32_t subgroup)
//       Work items of this subgroup of the group have met at a barrier of subgroups.
//   void exchange_ends()
//       All items of the group have stopped, and those in a shuffle have their results and resume.
//   void phase_ends(bool diverges, uint32_t ended)
//       All items of the group have ended or wait at a barrier with `barrier_flags`. If `diverges`, the item `ended`
//       has ended, or waits elsewhere, while others wait for it.
//   touch<Access>(address, size, instruction)
//       Called before a memory access. end_item() prevents the access.
//   void transferred(uint64_t bytes)
//       A copy or fill has read and written this many bytes in total.
//   bool allocated(address, bytes)
//       A segment was allocated; `bytes` is the requested size. Returns whether it can be used.
//   void freed(address, bytes)
//       A segment was freed; `bytes` is its actual size.

#pragma once

#include <cstdint>
#include <mutex>

namespace {  // everything is one translation unit, and a process can load the libraries of several observers

constexpr uint32_t kSubgroup = 32;  // work items of a subgroup
constexpr uint64_t kLocalGuard = 256;  // bytes before local memory that nothing uses; library.py has the same number
constexpr uint64_t kLocal = 1, kGlobal = 2;  // flags of a barrier: CLK_LOCAL_MEM_FENCE, CLK_GLOBAL_MEM_FENCE

struct Argument {  // device memory at an offset, or `bytes` of a number at `data`; see docs/driver-contract.md
  char* memory;
  uint64_t offset;
  void* data;
  uint64_t bytes;
};

struct Kernel {  // library.py declares the same structure
  void (*run)(const Argument* arguments);
  uint64_t has_barriers;  // or shuffles
  uint64_t number;
  uint64_t image_begin;  // beginning of its library, which has constants, a guard, and local memory behind them
  uint64_t local_begin, local_end;
};

struct Launch {
  const Kernel* kernel;
  const Argument* arguments;
  uint64_t items[3], group[3], groups[3];  // global size, group size, number of groups
  uint64_t group_items, group_count;
};

enum Access : uint16_t { kNone, kRead, kWrite, kSwap };

// Held during a launch, copy or fill. Protects the following variables.
std::mutex launching;
Launch launch;
uint64_t group = 0;
uint32_t item = 0;  // its number in the group
uint32_t barrier_flags = 0;
uint64_t stack_end = 0;  // the highest address of the item's stack

void run_group(uint64_t number);
[[noreturn]] void end_item();

// Whether an address is on the item's stack. Must be called below the kernel in the call stack.
inline __attribute__((always_inline)) bool is_own(uint64_t address) {
  const auto frame = reinterpret_cast<uint64_t>(__builtin_frame_address(0));
  return address - frame < stack_end - frame;
}

constexpr uint64_t kArena = uint64_t{1} << 38;  // size of the address range for device memory
constexpr uint64_t kPage = 2 << 20;             // segments are multiples of this, with an inaccessible page between
char* arena = nullptr;

inline bool in_arena(uint64_t address) {
  return address - reinterpret_cast<uint64_t>(arena) < kArena;
}

// Returns the address of the segment that begins at or before `address`, and stores its size; 0 if there is none.
uint64_t segment_before(uint64_t address, uint64_t* bytes);

}  // namespace
