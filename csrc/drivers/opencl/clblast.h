// CLBlast's matrix products, as routines of the family matmul (torch_backplane.drivers.libraries).
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace backplane {

// Returns the address of the routine for each dtype name. `functions`: the addresses of CLBlastSgemm,
// CLBlastSgemmStridedBatched, CLBlastDgemm and CLBlastDgemmStridedBatched. Throws ValueError if one is missing. To be
// called once: the addresses are kept in global variables.
std::map<std::string, uintptr_t> clblast_products(const std::map<std::string, uintptr_t>& functions);

} // namespace backplane
