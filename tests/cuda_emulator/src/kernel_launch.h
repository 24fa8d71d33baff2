// What libcuda tells the kernel observer about a launch, as its last argument.

#pragma once

#include <cstdint>
#include <utility>

struct KernelLaunchFacts {
  const char* name;
  uint64_t arena, arena_bytes; // addresses of device memory
  uint64_t image, image_bytes; // the module's variables and constants, with its static shared memory
  const uint8_t* owners; // of each 512 bytes of the arena: bits of the devices that can access them
  uint8_t mask; // bits that this launch can access
  bool reports; // print illegal accesses
  const std::pair<uint64_t, uint64_t>* ranges; // other memory that the kernel can access: begin, end
  uint64_t range_count;
  int error; // result: a CUresult
};
