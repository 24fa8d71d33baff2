// PyTorch's C++ meta functions of structured operators, past the Python ones that are registered over them.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>

#include <string>

namespace backplane {

// The function of "aten::add.out"; nullptr where there is none.
const c10::KernelFunction* structured_meta(const std::string& name);

} // namespace backplane
