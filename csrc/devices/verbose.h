// The output of torch.backends.bp.verbose: a line for each library call.
#pragma once

#include <c10/macros/Macros.h>

#include <chrono>
#include <string>

namespace backplane {

void set_verbose(bool on);
bool is_verbose();
// Prints a line with `what` and the time that it took, and flushes.
void print_call(const std::string& what, std::chrono::nanoseconds time);

// Runs `call` and, in verbose mode, prints `describe()` and the time that it took.
template <typename Call, typename Describe>
void run_verbosely(const Call& call, const Describe& describe) {
  if (C10_LIKELY(!is_verbose())) {
    call();
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  call();
  print_call(describe(), std::chrono::steady_clock::now() - start);
}

} // namespace backplane
