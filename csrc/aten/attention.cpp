// Scaled dot product attention: bp takes the CPU's flash kernel where the CPU would, and the composite form elsewhere.
#include <ATen/SDPBackend.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "devices/device.h"
#include "fallback/fallback.h"

namespace backplane {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
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
  constexpr auto kMath = static_cast<int64_t>(at::SDPBackend::math);
  if (mask.has_value() && mask->requires_grad() && c10::GradMode::is_enabled()) {
    return kMath; // the flash kernel gives no gradient for the mask
  }
  if (!device(query.device().index()).properties().dialect.empty()) {
    return kMath; // its operators run on the device, the CPU's kernel does not
  }
  static const auto op = find("aten::_fused_sdp_choice");
  torch::jit::Stack stack;
  torch::jit::push(stack, query, key, value, mask, dropout_p, is_causal, scale, enable_gqa);
  run_on_cpu(op, op, &stack);
  const bool flash = stack[0].toInt() == static_cast<int64_t>(at::SDPBackend::flash_attention);
  return flash ? static_cast<int64_t>(at::SDPBackend::overrideable) : kMath;
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
  static const auto op = find("aten::_scaled_dot_product_flash_attention_for_cpu");
  torch::jit::Stack stack;
  torch::jit::push(stack, query, key, value, dropout_p, is_causal, bias, scale);
  run_on_cpu(op, op, &stack);
  // No dropout, hence no random state; no packed sequences, hence no cumulative lengths.
  return {
      stack[0].toTensor(), stack[1].toTensor(), Tensor(), Tensor(), query.sym_size(2), key.sym_size(2),
      at::empty({}, at::kLong), at::empty({}, at::kLong), Tensor()};
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
    const Tensor&,
    const Tensor&,
    std::optional<double> scale) {
  static const auto op = find("aten::_scaled_dot_product_flash_attention_for_cpu_backward");
  torch::jit::Stack stack;
  const OptionalTensor mask = bias.defined() ? OptionalTensor(bias) : std::nullopt;
  torch::jit::push(stack, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, mask, scale);
  run_on_cpu(op, op, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(), Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", &choose);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}

} // namespace
} // namespace backplane

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &backplane::choose)
} // namespace at::native
