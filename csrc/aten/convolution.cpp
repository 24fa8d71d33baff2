// The CPU fallback of convolutions that no planner handles (torch_backplane/operators/convolution.py). On other devices
// PyTorch calls "overrideable" operators, which have no CPU kernel. Their arguments are those of the CPU's convolution.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "c10/operators.h"
#include "fallback/fallback.h"

namespace backplane {
namespace {

void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto kernel = find_operator("aten::convolution");
  run_on_cpu(op, kernel, stack);
}

// convolution_backward takes the sizes of the bias. The overrideable operator only has whether its gradient is needed.
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
  static const auto op = find_operator("aten::convolution_backward");
  torch::jit::Stack stack;
  const auto integers = [](c10::SymIntArrayRef values) { return C10_AS_INTARRAYREF_SLOW(values).vec(); };
  torch::jit::push(stack, grad_output, input, weight);
  if (output_mask[2]) {
    torch::jit::push(stack, std::vector<int64_t>{grad_output.size(1)});
  } else {
    torch::jit::push(stack, c10::IValue());
  }
  torch::jit::push(
      stack, integers(stride), integers(padding), integers(dilation), transposed, integers(output_padding),
      groups.guard_int(__FILE__, __LINE__), c10::List<bool>({output_mask[0], output_mask[1], output_mask[2]}));
  run_on_cpu(op, op, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

} // namespace
} // namespace backplane
