// Pages of host memory: address space, and memory behind it.
#pragma once

#include <cstddef>

namespace backplane::pages {

// Reserves addresses without memory. Returns nullptr if there are none left.
void* reserve(size_t bytes);

// Frees a whole reservation, with the memory behind it.
void release(void* address, size_t bytes);

// Puts zeroed memory behind a part of a reservation. Returns false if there is none left.
bool commit(void* address, size_t bytes);

// Gives back the memory behind a part of a reservation, which stays reserved.
void decommit(void* address, size_t bytes);

} // namespace backplane::pages
