// Kinds of tensors that bp does not support: sparse, quantized, nested and mkldnn.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace backplane {

// The kind of a `tensor` that bp does not support, for example "sparse"; nullptr for a dense, strided tensor.
const char* unsupported_kind(const at::Tensor& tensor);

// Throws a NotImplementedError that names the operator, the kind, and what to do instead.
[[noreturn]] void refuse_kind(std::string_view operator_name, const char* kind);

} // namespace backplane
