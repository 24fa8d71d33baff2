// Convolution. PyTorch gives it to other devices under names of their own («overrideable»), for which the CPU has no
// kernel; the arguments are those of the CPU's convolution. Devices that run kernels have planners for operators of ours
// (torch_backplane/operators/convolution.py).
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <torch/library.h>

#include "device.h"
#include "fallback.h"

namespace backplane {
namespace {

bool runs_kernels(const at::Tensor& tensor) {
  return tensor.is_privateuseone() && !device(tensor.device().index()).properties().dialect.empty();
}

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto kernel = find("aten::convolution");
  static const auto planned = find("backplane::convolution");
  if (runs_kernels(torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor())) {
    planned.callBoxed(stack);
  } else {
    run_on_cpu(op, kernel, stack);
  }
}

// convolution_backward takes the sizes of the bias, where the overrideable form only says whether its gradient is wanted.
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> output_mask) {
  if (runs_kernels(input)) {
    static const auto planned = find("backplane::convolution_backward").typed<decltype(convolution_backward)>();
    return planned.call(
        grad_output, input, weight, stride, padding, dilation, transposed, output_padding, std::move(groups),
        output_mask);
  }
  static const auto kernel = find("aten::convolution_backward");
  torch::jit::Stack stack;
  const auto integers = [](c10::SymIntArrayRef values) {
    return C10_AS_INTARRAYREF_SLOW(values).vec();
  };
  torch::jit::push(stack, grad_output, input, weight);
  if (output_mask[2]) {
    torch::jit::push(stack, std::vector<int64_t>{grad_output.size(1)});
  } else {
    torch::jit::push(stack, c10::IValue());
  }
  torch::jit::push(
      stack, integers(stride), integers(padding), integers(dilation), transposed, integers(output_padding),
      groups.guard_int(__FILE__, __LINE__),
      c10::List<bool>({output_mask[0], output_mask[1], output_mask[2]}));
  run_on_cpu(kernel, kernel, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

// For calls that the planners leave to the CPU.
at::Tensor convolution_on_cpu(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  return at::convolution_symint(
      input, weight, bias, stride, padding, dilation, transposed, output_padding, std::move(groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward_on_cpu(
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> output_mask) {
  const c10::SymInt channels = grad_output.sym_size(1);
  const auto bias_sizes =
      output_mask[2] ? at::OptionalSymIntArrayRef(c10::SymIntArrayRef(&channels, 1)) : at::OptionalSymIntArrayRef();
  return at::convolution_backward_symint(
      grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, std::move(groups),
      output_mask);
}

TORCH_LIBRARY_FRAGMENT(backplane, m) {
  m.def(
      "convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
      "bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor");
  m.def(
      "convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, bool[3] output_mask) "
      "-> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(backplane, CPU, m) {
  m.impl("convolution", &convolution_on_cpu);
  m.impl("convolution_backward", &convolution_backward_on_cpu);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

} // namespace
} // namespace backplane
