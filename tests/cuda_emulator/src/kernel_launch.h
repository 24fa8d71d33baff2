// What libcuda tells the kernel observer about a launch, as its last argument.

#pragma once

#include <cstdint>
#include <utility>

constexpr uint64_t kDynamicBytes = 227 << 10; // in the image of a module, for dynamic shared memory; see kernel_table.h

// Memory that a kernel can access, with the pointer parameter or the variable of the module that leads there.
struct KernelRange {
  uint64_t begin, end;
  uint64_t pointer; // the parameter's value, or the address of the variable
  uint64_t element; // bytes of what it points to
  const char* name; // null if no parameter points there
};

struct KernelLaunchFacts {
  const char* name;
  uint64_t arena, arena_bytes; // addresses of device memory
  uint64_t image, image_bytes; // the module's variables and constants, with its static shared memory
  uint64_t dynamic, dynamic_bytes; // dynamic shared memory
  const uint8_t* owners; // of each 512 bytes of the arena: bits of the devices that can access them
  uint8_t mask; // bits that this launch can access
  bool reports; // print illegal accesses
  const std::pair<uint64_t, uint64_t>* ranges; // other memory that the kernel can access: begin, end
  uint64_t range_count;
  bool checks; // CUDA_EMULATOR_CHECKS; the rest is for it
  bool continues; // after findings
  const KernelRange* memory; // by address
  uint64_t memory_count;
  const std::pair<uint64_t, uint64_t>* freed; // begin, end
  uint64_t freed_count;
  int error; // result: a CUresult
};
