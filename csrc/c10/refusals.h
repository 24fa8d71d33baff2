// Kinds of tensor that bp does not have: sparse, quantized, nested and mkldnn ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace backplane {

// The kind of `tensor` when bp cannot have it, for example "sparse"; nullptr for a dense, strided one.
const char* unsupported_kind(const at::Tensor& tensor);

// Throws the NotImplementedError that names the operator, the kind, and what to do instead.
[[noreturn]] void refuse_kind(std::string_view operator_name, const char* kind);

} // namespace backplane
