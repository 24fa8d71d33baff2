#include "c10/refusals.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

namespace backplane {

const char* unsupported_kind(const at::Tensor& tensor) {
  using Key = c10::DispatchKey;
  constexpr c10::DispatchKeySet kUnsupported{Key::Sparse, Key::SparseCsr, Key::Quantized, Key::NestedTensor};
  const auto keys = tensor.key_set();
  if (C10_LIKELY(!keys.has_any(kUnsupported) && tensor.layout() == c10::kStrided)) {
    return nullptr;
  }
  return keys.has(Key::Sparse)      ? "sparse"
      : keys.has(Key::SparseCsr)    ? "sparse compressed"
      : keys.has(Key::Quantized)    ? "quantized"
      : keys.has(Key::NestedTensor) ? "nested"
                                    : "mkldnn";
}

void refuse_kind(std::string_view operator_name, const char* kind) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, operator_name, ": ", kind, " tensors are not supported on bp; keep them on the CPU");
}

namespace {

// One function per kind, because a boxed kernel carries no state.
struct Sparse {
  static constexpr const char* kName = "sparse";
};
struct SparseCompressed {
  static constexpr const char* kName = "sparse compressed";
};
struct Quantized {
  static constexpr const char* kName = "quantized";
};
struct Nested {
  static constexpr const char* kName = "nested";
};
struct Mkldnn {
  static constexpr const char* kName = "mkldnn";
};

template <typename Kind>
void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  refuse_kind(toString(op.operator_name()), Kind::kName);
}

template <typename Kind>
void refuse_all(torch::Library& library, std::initializer_list<const char*> operators) {
  for (const char* name : operators) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse<Kind>>());
  }
}

// nn.TransformerEncoder calls this before it converts a padded batch to a nested tensor for its fast path, which it
// also takes for PrivateUse1. If this returns false, it continues with the padded batch.
bool no_padding_for_nested(const at::Tensor&, const at::Tensor&) {
  return false;
}

// Operators that create such tensors from dense ones. Failing before they start gives a clearer error.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  refuse_all<Sparse>(m, {"_to_sparse", "_to_sparse.sparse_dim", "_sparse_coo_tensor_unsafe"});
  refuse_all<SparseCompressed>(
      m, {"_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc", "_sparse_compressed_tensor_unsafe"});
  refuse_all<Quantized>(
      m,
      {"quantize_per_tensor", "quantize_per_tensor.tensor_qparams", "quantize_per_tensor.tensors",
       "quantize_per_tensor_dynamic", "quantize_per_channel", "_empty_affine_quantized",
       "_empty_per_channel_affine_quantized", "_make_per_tensor_quantized_tensor",
       "_make_per_channel_quantized_tensor"});
  refuse_all<Nested>(
      m,
      {"_nested_tensor_from_tensor_list", "_nested_tensor_from_mask", "_nested_from_padded",
       "_nested_view_from_buffer"});
  m.impl("_nested_tensor_from_mask_left_aligned", &no_padding_for_nested);
  refuse_all<Mkldnn>(m, {"to_mkldnn"});
}

// These have composite kernels, which would take precedence over the fallback below.
TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  refuse_all<SparseCompressed>(
      m,
      {"_sparse_compressed_tensor_unsafe", "_sparse_csr_tensor_unsafe", "_sparse_csc_tensor_unsafe",
       "_sparse_bsr_tensor_unsafe", "_sparse_bsc_tensor_unsafe", "_sparse_compressed_tensor_with_dims"});
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse<Sparse>>());
}

TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse<SparseCompressed>>());
}

TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse<Quantized>>());
}

TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse<Nested>>());
}

} // namespace
} // namespace backplane
