// The launcher of a driver that implements it as C functions (api "c" in torch_backplane.drivers.base.NATIVE_APIS;
// docs/driver-contract.md declares them).
#pragma once

#include "drivers/native_launcher.h"

namespace backplane {

// Throws ValueError if a required function is missing.
std::unique_ptr<NativeLauncher> make_c_launcher(const std::map<std::string, uintptr_t>& functions);

} // namespace backplane
