#include "devices/pages.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <sys/mman.h>
#endif

namespace backplane::pages {

#ifdef _WIN32

void* reserve(size_t bytes) {
  return VirtualAlloc(nullptr, bytes, MEM_RESERVE, PAGE_NOACCESS);
}

void release(void* address, size_t) {
  VirtualFree(address, 0, MEM_RELEASE);
}

bool commit(void* address, size_t bytes) {
  return VirtualAlloc(address, bytes, MEM_COMMIT, PAGE_READWRITE) != nullptr;
}

void decommit(void* address, size_t bytes) {
  VirtualFree(address, bytes, MEM_DECOMMIT);
}

#else

namespace {

constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

} // namespace

void* reserve(size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_NONE, kReserved, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

void release(void* address, size_t bytes) {
  munmap(address, bytes);
}

bool commit(void* address, size_t bytes) {
  if (mprotect(address, bytes, PROT_READ | PROT_WRITE) != 0) {
    return false;
  }
#ifdef MADV_HUGEPAGE
  madvise(address, bytes, MADV_HUGEPAGE); // fewer page faults on new segments; a failure is harmless
#endif
  return true;
}

void decommit(void* address, size_t bytes) {
  // Replaces the mapping. madvise(MADV_DONTNEED) does not free memory on macOS.
  mmap(address, bytes, PROT_NONE, kReserved | MAP_FIXED, -1, 0);
}

#endif

} // namespace backplane::pages
