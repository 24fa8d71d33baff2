// Fused scaled dot product attention, by one-pass kernels or PyTorch's CPU flash kernel
// (torch_backplane/operators/attention.py). Calls that neither supports use PyTorch's composite form. Devices without
// kernels use the CPU flash kernel where the CPU would.
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <array>
#include <cmath>

#include "aten/attention.h"
#include "aten/kernel_capabilities.h"
#include "c10/operators.h"
#include "devices/device.h"
#include "fallback/fallback.h"

namespace backplane {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

enum class Implementation {
  Composed, // matrix products and a softmax; on devices without kernels, the CPU flash kernel as a fallback
  OnePass, // one-pass kernels
  Host, // the CPU flash kernel, in stream order
};

// Kernels are for devices whose work items run in lockstep: on CPUs, products and a softmax are faster.
Implementation implementation_of(const Tensor& query) {
  const auto index = query.device().index();
  return attends_in_one_pass(index) && !runs_threads(index) ? Implementation::OnePass
      : computes_on_host(index)                             ? Implementation::Host
                                                            : Implementation::Composed;
}

bool is_probability(double p) {
  return p >= 0 && p <= 1;
}

// Whether the mask can be expanded to the shape of the scores.
bool fits(const Tensor& mask, const std::array<c10::SymInt, 4>& scores) {
  for (int64_t i = 1; i <= mask.dim(); ++i) {
    if (i > 4 || (mask.sym_size(-i) != 1 && mask.sym_size(-i) != scores[4 - i])) {
      return false;
    }
  }
  return true;
}

// Whether the one-pass kernels support the operands.
bool is_one_pass(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const OptionalTensor& mask,
    double dropout_p,
    bool enable_gqa) {
  for (const Tensor& tensor : {query, key, value}) {
    if (tensor.is_nested() || tensor.dim() != 4 || tensor.sym_numel() == 0 ||
        tensor.scalar_type() != query.scalar_type() || tensor.device() != query.device()) {
      return false;
    }
  }
  const auto heads = query.sym_size(1), shared = key.sym_size(1);
  return is_probability(dropout_p) && c10::isFloatingType(query.scalar_type()) &&
      query.sym_size(0) == key.sym_size(0) && query.sym_size(0) == value.sym_size(0) && shared == value.sym_size(1) &&
      (heads == shared || (enable_gqa && heads % shared == 0)) && query.sym_size(3) == key.sym_size(3) &&
      key.sym_size(2) == value.sym_size(2) &&
      (!mask.has_value() || fits(*mask, {query.sym_size(0), heads, query.sym_size(2), key.sym_size(2)}));
}

// Whether PyTorch's CPU flash kernel supports operands of matching sizes: the conditions of PyTorch's
// use_flash_attention_cpp.
bool is_flash_on_cpu(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask, double dropout_p) {
  const bool are_rows = query.sym_stride(3) == 1 && key.sym_stride(3) == 1 && value.sym_stride(3) == 1;
  return are_rows && dropout_p == 0 && query.sym_size(3) == value.sym_size(3) &&
      (!mask.has_value() || mask->dim() == 2 || mask->dim() == 4);
}

// A device has one fused attention. Each of these backends enables it.
bool is_fusing_enabled() {
  const auto& context = at::globalContext();
  return context.userEnabledFlashSDP() || context.userEnabledMemEfficientSDP() || context.userEnabledCuDNNSDP() ||
      context.userEnabledOverrideableSDP();
}

// Why the fused operator does not support the call; nullptr if it does.
const char* why_not(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const OptionalTensor& mask,
    double dropout_p,
    bool enable_gqa) {
  const bool runs_kernels = !device(query.device().index()).properties().dialect.empty();
  if (!is_fusing_enabled()) {
    return "every SDPBackend that selects it is disabled: FLASH_ATTENTION, EFFICIENT_ATTENTION, CUDNN_ATTENTION and "
           "OVERRIDEABLE";
  }
  const char* sizes =
      "query, key and value need four dimensions, the same floating-point dtype, matching sizes and at least one "
      "element, and the mask must be expandable to the scores";
  if (!is_one_pass(query, key, value, mask, dropout_p, enable_gqa)) {
    return sizes;
  }
  const auto index = query.device().index();
  const bool wants_mask_gradient = mask.has_value() && mask->requires_grad() && c10::GradMode::is_enabled();
  if (implementation_of(query) == Implementation::OnePass) {
    return nullptr;
  }
  // Without the composite form, the CPU's flash kernel as a fallback is the only way left.
  if (runs_kernels && !computes_on_host(index) && at::globalContext().userEnabledMathSDP()) {
    return "the kernels need work items that run in lockstep, and enough local memory";
  }
  // The CPU's flash kernel
  if (wants_mask_gradient) {
    return "the CPU's flash kernel does not compute a gradient for the mask";
  }
  if (runs_kernels && query.sym_size(1) != key.sym_size(1)) {
    return "the CPU's flash kernel does not support shared heads (enable_gqa) on this device";
  }
  return is_flash_on_cpu(query, key, value, mask, dropout_p) ? nullptr
                                                             : "the CPU's flash kernel does not support the call";
}

int64_t choose(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const OptionalTensor& mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  const bool runs_kernels = !device(query.device().index()).properties().dialect.empty();
  // CPU kernels check the probability, but the composite form ignores a negative one.
  TORCH_CHECK(
      !runs_kernels || is_probability(dropout_p), "dropout probability has to be between 0 and 1, but got ", dropout_p);
  if (!is_fusing_enabled() && !at::globalContext().userEnabledMathSDP()) {
    return static_cast<int64_t>(at::SDPBackend::error);
  }
  if (query.layout() == at::kJagged && is_fusing_enabled()) { // torch_backplane/fused_attention.py
    return static_cast<int64_t>(at::SDPBackend::overrideable);
  }
  const char* reason = why_not(query, key, value, mask, dropout_p, enable_gqa);
  if (reason == nullptr) {
    return static_cast<int64_t>(at::SDPBackend::overrideable);
  }
  TORCH_CHECK(
      at::globalContext().userEnabledMathSDP(),
      "No available kernel. Aborting execution. SDPBackend.MATH is disabled, and fused attention is not available: ",
      reason);
  return static_cast<int64_t>(at::SDPBackend::math);
}

// The probability that a weight is kept; nullopt without dropout.
std::optional<double> keep_probability(double dropout_p) {
  return dropout_p == 0 ? std::nullopt : std::optional<double>(1 - dropout_p);
}

double scale_of(const Tensor& query, std::optional<double> scale) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
}

// `found` with the layout that PyTorch's meta kernel gives it, which compiled graphs rely on: that of empty_like(like).
Tensor with_layout_of(const Tensor& like, const Tensor& found) {
  if (!found.defined() || found.sym_strides() == like.sym_strides()) {
    return found;
  }
  const Tensor result = at::empty_like(like);
  return result.sym_sizes() != found.sym_sizes() || result.sym_strides() == found.sym_strides() ? found
                                                                                                : result.copy_(found);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const OptionalTensor& bias,
    double dropout_p,
    bool is_causal,
    bool return_debug_mask,
    std::optional<double> scale) {
  torch::jit::Stack stack;
  if (implementation_of(query) != Implementation::Composed) {
    // choose() checks this, too, but direct calls of the operator bypass it.
    TORCH_CHECK(
        is_one_pass(query, key, value, bias, dropout_p, /*enable_gqa=*/true),
        "fused attention needs four-dimensional operands of one floating-point dtype and matching sizes, and a "
        "dropout_p between 0 and 1, but got sizes ",
        query.sym_sizes(), ", ", key.sym_sizes(), ", ", value.sym_sizes(), " and dropout_p=", dropout_p);
    TORCH_CHECK(
        implementation_of(query) != Implementation::Host || (dropout_p == 0 && query.sym_size(1) == key.sym_size(1)),
        "the CPU's flash kernel does not support dropout, and needs as many heads of keys as of queries");
    static const auto one_pass = find_operator("backplane::attention");
    torch::jit::push(stack, query, key, value, bias, is_causal, scale_of(query, scale), keep_probability(dropout_p));
    one_pass.callBoxed(stack);
    // Seed and offset are one tensor on the device, because they differ in each replay of a plan.
    const Tensor state = stack[2].toTensor();
    return {
        stack[0].toTensor(),
        stack[1].toTensor(),
        Tensor(),
        Tensor(),
        query.sym_size(2),
        key.sym_size(2),
        state.defined() ? state : at::empty({}, at::kLong),
        at::empty({}, at::kLong),
        Tensor()};
  }
  static const auto op = find_operator("aten::_scaled_dot_product_flash_attention_for_cpu");
  torch::jit::push(stack, query, key, value, dropout_p, is_causal, bias, scale);
  run_on_cpu(op, op, &stack);
  const Tensor out = with_layout_of(query, stack[0].toTensor());
  // No dropout, hence no random state; no packed sequences, hence no cumulative lengths.
  return {
      out,
      stack[1].toTensor(),
      Tensor(),
      Tensor(),
      query.sym_size(2),
      key.sym_size(2),
      at::empty({}, at::kLong),
      at::empty({}, at::kLong),
      Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& bias,
    std::array<bool, 4> grad_input_mask,
    const Tensor& out,
    const Tensor& logsumexp,
    const Tensor&,
    const Tensor&,
    c10::SymInt,
    c10::SymInt,
    double dropout_p,
    bool is_causal,
    const Tensor& state,
    const Tensor&,
    std::optional<double> scale) {
  torch::jit::Stack stack;
  const OptionalTensor mask = bias.defined() ? OptionalTensor(bias) : std::nullopt;
  if (implementation_of(query) != Implementation::Composed) {
    static const auto one_pass = find_operator("backplane::attention_backward");
    const auto keep = keep_probability(dropout_p);
    torch::jit::push(stack, grad_out, query, key, value, mask, out, logsumexp, is_causal, scale_of(query, scale));
    torch::jit::push(stack, keep, keep.has_value() ? OptionalTensor(state) : std::nullopt, grad_input_mask);
    one_pass.callBoxed(stack);
    return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(), stack[3].toTensor()};
  }
  static const auto op = find_operator("aten::_scaled_dot_product_flash_attention_for_cpu_backward");
  torch::jit::push(stack, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, mask, scale);
  run_on_cpu(op, op, &stack);
  return {
      with_layout_of(query, stack[0].toTensor()), with_layout_of(key, stack[1].toTensor()),
      with_layout_of(value, stack[2].toTensor()), Tensor()};
}

// query, key and value have four dimensions; key and value can have fewer heads. `keep`: the probability that a weight
// is kept, with dropout. The second result is, for each query, the logarithm of its softmax's denominator. The third is
// the generator's state, which the backward needs with dropout.
TORCH_LIBRARY_FRAGMENT(backplane, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? bias, bool is_causal, float scale, float? kept) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor out, "
      "Tensor logarithm, bool is_causal, float scale, float? kept, Tensor? state, bool[4] wanted) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", &choose);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}

} // namespace

std::string why_attention_is_composed(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const OptionalTensor& mask,
    double dropout_p,
    bool enable_gqa) {
  const char* reason = why_not(query, key, value, mask, dropout_p, enable_gqa);
  return reason == nullptr ? "" : reason;
}

} // namespace backplane

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &backplane::choose)
} // namespace at::native
