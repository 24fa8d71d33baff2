// CLBlast's matrix products, as routines of the family matmul (torch_backplane.drivers.libraries).
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace backplane {

// For each dtype's name the address of the function. `functions` are addresses of CLBlast's: CLBlastSgemm,
// CLBlastSgemmStridedBatched and the same of double. Throws where one is missing. Called once: CLBlast's are kept for good.
std::map<std::string, uintptr_t> clblast_products(const std::map<std::string, uintptr_t>& functions);

} // namespace backplane
