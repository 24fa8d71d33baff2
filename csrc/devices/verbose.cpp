#include "devices/verbose.h"

#include <atomic>
#include <cstdio>

namespace backplane {
namespace {

std::atomic<bool> wanted{false};

} // namespace

void set_verbose(bool on) {
  wanted.store(on, std::memory_order_relaxed);
}

bool is_verbose() {
  return wanted.load(std::memory_order_relaxed);
}

void print_call(const std::string& what, std::chrono::nanoseconds time) {
  std::printf("backplane: %s: %.3f ms\n", what.c_str(), std::chrono::duration<double, std::milli>(time).count());
  std::fflush(stdout);
}

} // namespace backplane
