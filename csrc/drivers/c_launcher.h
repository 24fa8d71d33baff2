// A driver's own launcher: four functions of C (torch_backplane.drivers.base.NATIVE_APIS, docs/write-a-driver.md).
#pragma once

#include "drivers/native_launcher.h"

namespace backplane {

// Throws where a function is missing.
std::unique_ptr<NativeLauncher> make_c_launcher(const std::map<std::string, uintptr_t>& functions);

} // namespace backplane
