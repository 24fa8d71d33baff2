// A function of a C library that Python code has loaded.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace backplane {

struct LibrarySymbol {
  std::string name; // for messages
  uintptr_t address;
  std::shared_ptr<void> owner; // keeps the library loaded
};

} // namespace backplane
