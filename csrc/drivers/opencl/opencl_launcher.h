// The native launcher for OpenCL 1.2 and later.
#pragma once

#include "drivers/native_launcher.h"

namespace backplane {

std::unique_ptr<NativeLauncher> make_opencl_launcher(const std::map<std::string, uintptr_t>& functions);

} // namespace backplane
