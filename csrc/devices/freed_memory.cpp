#include "devices/freed_memory.h"

#include <cstdlib>
#include <cstring>
#include <mutex>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace backplane {
namespace {

void set() {
#ifdef __GLIBC__
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  if (std::getenv("MALLOC_MMAP_THRESHOLD_") != nullptr || std::getenv("MALLOC_TRIM_THRESHOLD_") != nullptr ||
      (tunables != nullptr && std::strstr(tunables, "glibc.malloc.") != nullptr)) {
    return;
  }
  mallopt(M_MMAP_THRESHOLD, 32 << 20); // the most that glibc chooses by itself, once as much was freed
  mallopt(M_TRIM_THRESHOLD, 128 << 20);
#endif
}

} // namespace

void keep_freed_memory() {
  static std::once_flag once;
  std::call_once(once, set);
}

} // namespace backplane
