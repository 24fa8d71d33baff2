// Operators of the CPU's whose results go where arguments say, for planners that have the host compute on the device's memory
// (torch_backplane.planning.host): PyTorch has them without `out=` only, or with results that are always wanted.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

// PyTorch's way to oneDNN's products, which it takes for halves and bfloat16; there is no header of it.
namespace at::native {
__attribute__((weak)) void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& out, float beta, float alpha);
}

namespace backplane {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Whether oneDNN multiplies faster than PyTorch's MKL. On processors of others than Intel, MKL leaves half of the vector
// registers unused: oneDNN took 0.3 to 0.6 of its time from 2 million multiplications on (docs/measurements.md). Single rows and
// columns are not faster, and oneDNN 3.x damages the heap when it adds to a row that it multiplies by a turned matrix.
bool is_onednns(const Tensor& a, const Tensor& b, const Tensor& out) {
#if defined(__x86_64__)
  static const bool is_faster = at::Context::hasMKL() && at::Context::hasMKLDNN() && at::native::mkldnn_matmul != nullptr &&
      !__builtin_cpu_is("intel");
#else
  constexpr bool is_faster = false;
#endif
  constexpr int64_t kFewest = 4; // rows and columns
  if (!is_faster || !at::globalContext().userEnabledMkldnn() || !out.is_contiguous() || out.size(-2) < kFewest ||
      out.size(-1) < kFewest) {
    return false;
  }
  for (const Tensor* one : {&a, &b, &out}) {
    if (one->scalar_type() != at::kFloat) {
      return false;
    }
  }
  constexpr int64_t kMultiplications = 1 << 21;
  return out.numel() * a.size(-1) >= kMultiplications;
}

// out = beta * added + alpha * a @ b, of matrices or batches of them. Without `added` beta is not looked at.
void product(
    const OptionalTensor& added,
    const Tensor& a,
    const Tensor& b,
    const at::Scalar& beta,
    const at::Scalar& alpha,
    Tensor& out) {
  const bool batched = out.dim() == 3;
  const bool adds = added.has_value() && beta.toDouble() != 0;
  if (alpha.toDouble() != 0 && is_onednns(a, b, out)) {
    if (adds && !added->is_same(out)) {
      out.copy_(*added);
    }
    at::native::mkldnn_matmul(a, b, out, adds ? beta.to<float>() : 0, added.has_value() ? alpha.to<float>() : 1);
  } else if (added.has_value()) {
    batched ? at::baddbmm_out(out, *added, a, b, beta, alpha) : at::addmm_out(out, *added, a, b, beta, alpha);
  } else {
    batched ? at::bmm_out(out, a, b) : at::mm_out(out, a, b);
  }
}

// Without dropout, as the arguments of backplane::attention (attention.cpp). PyTorch's kernels have heads next to columns, which
// seldom is what a place has.
void attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const OptionalTensor& bias,
    bool is_causal,
    double scale,
    const Tensor& out,
    const Tensor& logarithm) {
  const auto [result, logarithms] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, /*dropout_p=*/0, is_causal, bias, scale);
  out.copy_(result);
  logarithm.copy_(logarithms);
}

void attention_backward(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const OptionalTensor& bias,
    const Tensor& out,
    const Tensor& logarithm,
    bool is_causal,
    double scale,
    const Tensor& of_query,
    const Tensor& of_key,
    const Tensor& of_value) {
  const auto [query_grad, key_grad, value_grad] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, out, logarithm, /*dropout_p=*/0, is_causal, bias, scale);
  of_query.copy_(query_grad);
  of_key.copy_(key_grad);
  of_value.copy_(value_grad);
}

TORCH_LIBRARY_FRAGMENT(backplane, m) {
  m.def(
      "host_attention(Tensor query, Tensor key, Tensor value, Tensor? bias, bool is_causal, float scale, *, "
      "Tensor(a!) out, Tensor(b!) logarithm) -> ()");
  m.def(
      "host_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor out, "
      "Tensor logarithm, bool is_causal, float scale, *, Tensor(a!) of_query, Tensor(b!) of_key, "
      "Tensor(c!) of_value) -> ()");
  m.def("host_product(Tensor? added, Tensor a, Tensor b, Scalar beta, Scalar alpha, *, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(backplane, CPU, m) {
  m.impl("host_product", &product);
  m.impl("host_attention", &attention);
  m.impl("host_attention_backward", &attention_backward);
}

} // namespace
} // namespace backplane
