// PyTorch's C++ meta functions of structured operators: they check a call as its CPU and CUDA kernels do, and say what the
// results look like. The dispatcher does not lead to them: PyTorch registers Python functions over many, which refuse less.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>

#include <string>

namespace backplane {

// The function of "aten::add.out"; nullptr where there is none.
const c10::KernelFunction* structured_meta(const std::string& name);

} // namespace backplane
