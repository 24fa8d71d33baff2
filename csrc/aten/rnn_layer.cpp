#include "aten/rnn_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "aten/kernel_capabilities.h"
#include "aten/rnn_directions.h"
#include "aten/rnn_layer_on_cpu.h"
#include "c10/operators.h"
#include "devices/device.h"
#include "fallback/deferred.h"
#include "fallback/fallback.h"

namespace backplane {

using at::Tensor;
using c10::IValue;

namespace {

std::vector<Tensor> new_gradients(const LayerArguments& given) {
  const auto like = [](const Tensor& one) { return at::empty(one.sizes(), one.options()); };
  std::vector<Tensor> gradients{
      like(given.input), like(given.hx), given.cx.has_value() ? like(*given.cx) : nothing(given.input)};
  for (const Tensor& one : given.params) {
    gradients.push_back(like(one));
  }
  return gradients;
}

// On bp, the host computes a whole layer (by a planner, on devices that run kernels), or the layer is computed by
// steps.

bool runs_kernels(const Tensor& tensor) {
  return !device(tensor.device().index()).properties().dialect.empty();
}

// Whether a layer is one call on the host that runs immediately, or one that is deferred.
bool is_host_call(const Tensor& tensor) {
  return !runs_kernels(tensor) && !defers(tensor.device().index());
}
bool is_later_host_call(const Tensor& tensor) {
  return !runs_kernels(tensor) && defers(tensor.device().index());
}

// The operators are boxed, because they have too many arguments to repeat for each.

using c10::OperatorHandle;
using torch::jit::Stack;

void answer(Stack* stack, size_t arguments, const RnnResults& results) {
  torch::jit::drop(*stack, arguments);
  torch::jit::push(*stack, results.out, results.hy, results.cy, results.saved);
}

void answer(Stack* stack, size_t arguments, const std::vector<Tensor>& gradients) {
  torch::jit::drop(*stack, arguments);
  torch::jit::push(*stack, c10::List<Tensor>(gradients));
}

// Deferred calls on a host device, in stream order.
RnnResults layer_later(const LayerArguments& given, c10::ArrayRef<IValue> arguments) {
  const RnnResults results = new_results(given, /*training=*/arguments.back().toBool() && !is_onednn(given));
  Stack stack(arguments.begin(), arguments.end());
  torch::jit::push(stack, results.out, results.hy, if_any(results.cy), if_any(results.saved));
  static const auto op = find_operator("backplane::host_rnn_layer");
  op.callBoxed(stack);
  return results;
}

std::vector<Tensor> gradients_later(const LayerArguments& given, c10::ArrayRef<IValue> arguments) {
  const std::vector<Tensor> gradients = new_gradients(given);
  Stack stack(arguments.begin(), arguments.end());
  const c10::List<Tensor> of_params(std::vector<Tensor>(gradients.begin() + 3, gradients.end()));
  torch::jit::push(stack, gradients[0], gradients[1], if_any(gradients[2]), of_params);
  static const auto op = find_operator("backplane::host_rnn_layer_backward");
  op.callBoxed(stack);
  return gradients;
}

void layer_of_cpu(const OperatorHandle&, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, LayerArguments::kCount + 1);
  const LayerArguments given(arguments);
  const bool training = arguments.back().toBool();
  RnnResults results = new_results(given, training && !is_onednn(given));
  layer_on_cpu(given, results, training);
  answer(stack, LayerArguments::kCount + 1, results);
}

void gradients_of_cpu(const OperatorHandle&, Stack* stack) {
  answer(stack, Computed::kCount, gradients_on_cpu(Computed(torch::jit::last(*stack, Computed::kCount))));
}

} // namespace

bool bypasses_planner(const Tensor& tensor) {
  return runs_kernels(tensor) ? !computes_on_host(tensor.device().index()) : is_later_host_call(tensor);
}

void layer_of_bp(const OperatorHandle& op, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, LayerArguments::kCount + 1);
  const LayerArguments given(arguments);
  if (is_host_call(given.input)) {
    run_on_cpu(op, op, stack);
    return;
  }
  if (is_later_host_call(given.input)) {
    answer(stack, LayerArguments::kCount + 1, layer_later(given, arguments));
    return;
  }
  const bool training = arguments.back().toBool();
  const RnnResults results = new_results(given, training);
  for (int64_t i = 0; i < given.directions(); ++i) {
    layer_by_steps(given.direction(i), results.direction(i), training);
  }
  answer(stack, LayerArguments::kCount + 1, results);
}

void gradients_of_bp(const OperatorHandle& op, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, Computed::kCount);
  const Computed computed(arguments);
  const LayerArguments& given = computed.given;
  if (is_later_host_call(given.input)) {
    answer(stack, Computed::kCount, gradients_later(given, arguments));
    return;
  }
  if (is_host_call(given.input) || computed.results.saved.scalar_type() == at::kByte || saves_nothing(computed)) {
    run_on_cpu(op, op, stack); // with the last two conditions, the host has computed the layer
    return;
  }
  answer(stack, Computed::kCount, gradients(computed, [](const ComputedDirection& one) {
           return gradients_by_steps(one, one.results.saved);
         }));
}

namespace {

// The same operators with additional, partly optional arguments for the results, for planners.

void layer_into_results(const OperatorHandle&, Stack* stack) {
  constexpr size_t kInputs = LayerArguments::kCount + 1, kPlaces = 4;
  const auto arguments = torch::jit::last(*stack, kInputs + kPlaces);
  const LayerArguments given(arguments);
  const auto place = [&](size_t i) {
    return arguments[kInputs + i].toOptional<Tensor>().value_or(nothing(given.input));
  };
  RnnResults results{place(0), place(1), place(2), place(3)};
  layer_on_cpu(given, results, /*training=*/results.saved.numel() != 0);
  torch::jit::drop(*stack, kInputs + kPlaces);
}

void gradients_into_results(const OperatorHandle&, Stack* stack) {
  constexpr size_t kPlaces = 4;
  const auto arguments = torch::jit::last(*stack, Computed::kCount + kPlaces);
  const Computed computed(arguments);
  const auto places = arguments.slice(Computed::kCount);
  const std::vector<Tensor> found = gradients_on_cpu(computed);
  std::vector<OptionalTensor> wanted{places[0].toTensor(), places[1].toTensor(), places[2].toOptional<Tensor>()};
  for (const Tensor& one : places[3].toTensorVector()) {
    wanted.push_back(one);
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i].has_value()) {
      wanted[i]->copy_(found[i]);
    }
  }
  torch::jit::drop(*stack, Computed::kCount + kPlaces);
}

TORCH_LIBRARY_FRAGMENT(backplane, m) {
  m.def(
      "rnn_layer(Tensor input, Tensor hx, Tensor? cx, Tensor[] params, int mode, bool training) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "rnn_layer_backward(Tensor grad, Tensor grad_hy, Tensor grad_cy, Tensor input, Tensor hx, Tensor? cx, Tensor[] "
      "params, "
      "int mode, Tensor out, Tensor hy, Tensor cy, Tensor saved) -> Tensor[]");
  m.def(
      "host_rnn_layer(Tensor input, Tensor hx, Tensor? cx, Tensor[] params, int mode, bool training, *, Tensor(a!) "
      "out, "
      "Tensor(b!) hy, Tensor(c!)? cy, Tensor(d!)? saved) -> ()");
  m.def(
      "host_rnn_layer_backward(Tensor grad, Tensor grad_hy, Tensor grad_cy, Tensor input, Tensor hx, Tensor? cx, "
      "Tensor[] params, int mode, Tensor out, Tensor hy, Tensor cy, Tensor saved, *, Tensor(a!) of_input, Tensor(b!) "
      "of_hx, "
      "Tensor(c!)? of_cx, Tensor(d!)[] of_params) -> ()");
}

TORCH_LIBRARY_IMPL(backplane, CPU, m) {
  m.impl("rnn_layer", torch::CppFunction::makeFromBoxedFunction<&layer_of_cpu>());
  m.impl("rnn_layer_backward", torch::CppFunction::makeFromBoxedFunction<&gradients_of_cpu>());
  m.impl("host_rnn_layer", torch::CppFunction::makeFromBoxedFunction<&layer_into_results>());
  m.impl("host_rnn_layer_backward", torch::CppFunction::makeFromBoxedFunction<&gradients_into_results>());
}

// The meta kernels do nothing, because the results are given.
template <size_t count>
void drop_results(const OperatorHandle&, Stack* stack) {
  torch::jit::drop(*stack, count);
}

TORCH_LIBRARY_IMPL(backplane, Meta, m) {
  m.impl("host_rnn_layer", torch::CppFunction::makeFromBoxedFunction<&drop_results<LayerArguments::kCount + 1 + 4>>());
  m.impl("host_rnn_layer_backward", torch::CppFunction::makeFromBoxedFunction<&drop_results<Computed::kCount + 4>>());
}

TORCH_LIBRARY_IMPL(backplane, PrivateUse1, m) {
  m.impl("rnn_layer", torch::CppFunction::makeFromBoxedFunction<&layer_of_bp>());
  m.impl("rnn_layer_backward", torch::CppFunction::makeFromBoxedFunction<&gradients_of_bp>());
}

} // namespace
} // namespace backplane
