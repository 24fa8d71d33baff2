#include "aten/rnn_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <vector>

#include "aten/kernel_capabilities.h"
#include "aten/rnn_directions.h"
#include "aten/rnn_layer_on_cpu.h"
#include "devices/device.h"
#include "fallback/deferred.h"
#include "fallback/fallback.h"

namespace backplane {

using at::Tensor;
using c10::IValue;

namespace {

// Results and gradients that are to be filled

// `by_host`: what it saves may be bytes.
Results new_results(const Given& given, bool training, bool by_host) {
  const auto options = given.input.options();
  const int64_t kept = kept_of(given.mode);
  const bool in_bytes = by_host && given.mode == kLstm && options.dtype() == at::kFloat;
  return {
      at::empty(given.out_sizes(), options), at::empty(given.state_sizes(), options),
      given.mode == kLstm ? at::empty(given.state_sizes(), options) : nothing(given.input),
      !training || kept == 0 ? nothing(given.input)
          : in_bytes ? at::empty({given.directions(), most_bytes(given)}, options.dtype(at::kByte))
                     : at::empty({given.directions(), given.time(), given.batch(), kept * given.hidden()}, options)};
}

std::vector<Tensor> new_gradients(const Given& given) {
  const auto like = [](const Tensor& one) { return at::empty(one.sizes(), one.options()); };
  std::vector<Tensor> gradients{
      like(given.input), like(given.hx), given.cx.has_value() ? like(*given.cx) : nothing(given.input)};
  for (const Tensor& one : given.params) {
    gradients.push_back(like(one));
  }
  return gradients;
}

// On bp: whole layers of the host's, by planners on devices that run kernels, or steps.

bool runs_kernels(const Tensor& tensor) {
  return !device(tensor.device().index()).properties().dialect.empty();
}

// Whether a whole layer is a call of the host's; at once, or later.
bool is_host_call(const Tensor& tensor) {
  return !runs_kernels(tensor) && !defers(tensor.device().index());
}
bool is_later_host_call(const Tensor& tensor) {
  return !runs_kernels(tensor) && defers(tensor.device().index());
}

// The operators, boxed: so many arguments would otherwise be spelled out for each.

using c10::OperatorHandle;
using torch::jit::Stack;

void answer(Stack* stack, size_t arguments, const Results& results) {
  torch::jit::drop(*stack, arguments);
  torch::jit::push(*stack, results.out, results.hy, results.cy, results.saved);
}

void answer(Stack* stack, size_t arguments, const std::vector<Tensor>& gradients) {
  torch::jit::drop(*stack, arguments);
  torch::jit::push(*stack, c10::List<Tensor>(gradients));
}

// In the order of the stream, on a host device.
Results layer_later(const Given& given, c10::ArrayRef<IValue> arguments) {
  const Results results = new_results(given, /*training=*/arguments.back().toBool(), /*by_host=*/true);
  Stack stack(arguments.begin(), arguments.end());
  torch::jit::push(stack, results.out, results.hy, if_any(results.cy), if_any(results.saved));
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("backplane::host_rnn_layer", "");
  op.callBoxed(stack);
  return results;
}

std::vector<Tensor> gradients_later(const Given& given, c10::ArrayRef<IValue> arguments) {
  const std::vector<Tensor> gradients = new_gradients(given);
  Stack stack(arguments.begin(), arguments.end());
  const c10::List<Tensor> of_params(std::vector<Tensor>(gradients.begin() + 3, gradients.end()));
  torch::jit::push(stack, gradients[0], gradients[1], if_any(gradients[2]), of_params);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("backplane::host_rnn_layer_backward", "");
  op.callBoxed(stack);
  return gradients;
}

// On the device, by operators of its own.
std::vector<Tensor> gradients_by_steps(const Computed& computed) {
  std::vector<Gradients> found;
  for (int64_t i = 0; i < computed.given.directions(); ++i) {
    const ComputedDirection one = direction_of(computed, i);
    found.push_back(gradients_by_steps(one, one.results.saved));
  }
  const auto both = [&](Tensor Gradients::*which) {
    return found.size() == 1 ? (found[0].*which).unsqueeze(0) : at::stack({found[0].*which, found[1].*which});
  };
  std::vector<Tensor> gradients{
      found.size() == 1 ? found[0].input : found[0].input.add_(found[1].input), both(&Gradients::hx),
      computed.given.mode == kLstm ? both(&Gradients::cx) : found[0].cx};
  for (const Gradients& one : found) {
    gradients.insert(gradients.end(), {one.w_ih, one.w_hh});
    if (computed.given.params_of_one() == 4) {
      gradients.insert(gradients.end(), {one.b_ih, one.b_hh});
    }
  }
  return gradients;
}

void layer_of_cpu(const OperatorHandle&, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, Given::kCount + 1);
  const Given given(arguments);
  const bool training = arguments.back().toBool();
  const Results results = new_results(given, training, /*by_host=*/true);
  layer_on_cpu(given, results, training);
  answer(stack, Given::kCount + 1, results);
}

void gradients_of_cpu(const OperatorHandle&, Stack* stack) {
  const Computed computed(torch::jit::last(*stack, Computed::kCount));
  const std::vector<Tensor> gradients = new_gradients(computed.given);
  gradients_on_cpu(computed, gradients);
  answer(stack, Computed::kCount, gradients);
}

} // namespace

bool asks_no_planner(const Tensor& tensor) {
  return runs_kernels(tensor) ? !computes_on_host(tensor.device().index()) : is_later_host_call(tensor);
}

void layer_of_bp(const OperatorHandle& op, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, Given::kCount + 1);
  const Given given(arguments);
  if (is_host_call(given.input)) {
    run_on_cpu(op, op, stack);
    return;
  }
  if (is_later_host_call(given.input)) {
    answer(stack, Given::kCount + 1, layer_later(given, arguments));
    return;
  }
  const bool training = arguments.back().toBool();
  const Results results = new_results(given, training, /*by_host=*/false);
  for (int64_t i = 0; i < given.directions(); ++i) {
    layer_by_steps(given.direction(i), results.direction(i), training);
  }
  answer(stack, Given::kCount + 1, results);
}

void gradients_of_bp(const OperatorHandle& op, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, Computed::kCount);
  const Computed computed(arguments);
  const Given& given = computed.given;
  if (is_later_host_call(given.input)) {
    answer(stack, Computed::kCount, gradients_later(given, arguments));
    return;
  }
  if (is_host_call(given.input) || computed.results.saved.scalar_type() == at::kByte) { // bytes are a host's layer's
    run_on_cpu(op, op, stack);
    return;
  }
  answer(stack, Computed::kCount, gradients_by_steps(computed));
}

namespace {

// The same with results that go where further arguments say, if anywhere: for planners.

void layer_to_places(const OperatorHandle&, Stack* stack) {
  constexpr size_t kInputs = Given::kCount + 1, kPlaces = 4;
  const auto arguments = torch::jit::last(*stack, kInputs + kPlaces);
  const Given given(arguments);
  const auto place = [&](size_t i) {
    return arguments[kInputs + i].toOptional<Tensor>().value_or(nothing(given.input));
  };
  layer_on_cpu(given, {place(0), place(1), place(2), place(3)}, arguments[Given::kCount].toBool());
  torch::jit::drop(*stack, kInputs + kPlaces);
}

void gradients_to_places(const OperatorHandle&, Stack* stack) {
  constexpr size_t kPlaces = 4;
  const auto arguments = torch::jit::last(*stack, Computed::kCount + kPlaces);
  const Computed computed(arguments);
  const auto places = arguments.slice(Computed::kCount);
  std::vector<Tensor> gradients{
      places[0].toTensor(), places[1].toTensor(),
      places[2].toOptional<Tensor>().value_or(nothing(computed.given.input))};
  for (const Tensor& one : places[3].toTensorVector()) {
    gradients.push_back(one);
  }
  gradients_on_cpu(computed, gradients);
  torch::jit::drop(*stack, Computed::kCount + kPlaces);
}

TORCH_LIBRARY_FRAGMENT(backplane, m) {
  m.def(
      "rnn_layer(Tensor input, Tensor hx, Tensor? cx, Tensor[] params, int mode, bool training) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "rnn_layer_backward(Tensor grad, Tensor grad_hy, Tensor grad_cy, Tensor input, Tensor hx, Tensor? cx, Tensor[] params, "
      "int mode, Tensor out, Tensor hy, Tensor cy, Tensor saved) -> Tensor[]");
  m.def(
      "host_rnn_layer(Tensor input, Tensor hx, Tensor? cx, Tensor[] params, int mode, bool training, *, Tensor(a!) out, "
      "Tensor(b!) hy, Tensor(c!)? cy, Tensor(d!)? saved) -> ()");
  m.def(
      "host_rnn_layer_backward(Tensor grad, Tensor grad_hy, Tensor grad_cy, Tensor input, Tensor hx, Tensor? cx, "
      "Tensor[] params, int mode, Tensor out, Tensor hy, Tensor cy, Tensor saved, *, Tensor(a!) of_input, Tensor(b!) of_hx, "
      "Tensor(c!)? of_cx, Tensor(d!)[] of_params) -> ()");
}

TORCH_LIBRARY_IMPL(backplane, CPU, m) {
  m.impl("rnn_layer", torch::CppFunction::makeFromBoxedFunction<&layer_of_cpu>());
  m.impl("rnn_layer_backward", torch::CppFunction::makeFromBoxedFunction<&gradients_of_cpu>());
  m.impl("host_rnn_layer", torch::CppFunction::makeFromBoxedFunction<&layer_to_places>());
  m.impl("host_rnn_layer_backward", torch::CppFunction::makeFromBoxedFunction<&gradients_to_places>());
}

// Their places are as they are.
template <size_t count>
void leave_places(const OperatorHandle&, Stack* stack) {
  torch::jit::drop(*stack, count);
}

TORCH_LIBRARY_IMPL(backplane, Meta, m) {
  m.impl("host_rnn_layer", torch::CppFunction::makeFromBoxedFunction<&leave_places<Given::kCount + 1 + 4>>());
  m.impl("host_rnn_layer_backward", torch::CppFunction::makeFromBoxedFunction<&leave_places<Computed::kCount + 4>>());
}

TORCH_LIBRARY_IMPL(backplane, PrivateUse1, m) {
  m.impl("rnn_layer", torch::CppFunction::makeFromBoxedFunction<&layer_of_bp>());
  m.impl("rnn_layer_backward", torch::CppFunction::makeFromBoxedFunction<&gradients_of_bp>());
}

} // namespace
} // namespace backplane
