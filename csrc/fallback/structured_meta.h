// PyTorch's C++ meta functions of structured operators. They check a call like its CPU and CUDA kernels, and compute
// the sizes, strides and dtypes of the results. The dispatcher does not always reach them: PyTorch overrides many with
// Python functions that check less.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>

#include <string>

namespace backplane {

// The meta function of an overload such as "aten::add.out"; nullptr if there is none.
const c10::KernelFunction* structured_meta(const std::string& name);

} // namespace backplane
