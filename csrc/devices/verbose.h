// What torch.backends.bp.verbose prints: a line for each call of a library.
#pragma once

#include <c10/macros/Macros.h>

#include <chrono>
#include <string>

namespace backplane {

void set_verbose(bool on);
bool is_verbose();
// One line, at once: `what`, and how long it took.
void say_call(const std::string& what, std::chrono::nanoseconds time);

// Calls a library, and says so where that is wanted: `describe` gives the words.
template <typename Call, typename Describe>
void said(const Call& call, const Describe& describe) {
  if (C10_LIKELY(!is_verbose())) {
    call();
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  call();
  say_call(describe(), std::chrono::steady_clock::now() - start);
}

} // namespace backplane
