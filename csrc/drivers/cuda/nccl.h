// NCCL: collective communication of CUDA devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "devices/communicator.h"

namespace backplane::cuda {

// The names of the functions of NCCL that are called.
std::vector<std::string> nccl_functions();

// `functions`: the addresses of nccl_functions(). `index`: as in make_launcher(). `name`, `place`: of
// CommunicationLibrary. Throws ValueError if a function is missing.
std::shared_ptr<CommunicationLibrary> nccl_library(
    const std::map<std::string, uintptr_t>& functions, size_t index, std::string name, std::string place);

} // namespace backplane::cuda
