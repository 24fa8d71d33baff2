#include "aten/rnn_directions.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>

#include <algorithm>

#include "aten/rnn_steps.h"

namespace backplane {

using at::Tensor;
using c10::IValue;

int64_t gates_of(int64_t mode) {
  return mode == kLstm ? 4 : mode == kGru ? 3 : 1;
}

int64_t saved_per_unit(int64_t mode) {
  return mode == kLstm ? 5 : mode == kGru ? 4 : 0;
}

Tensor nothing(const Tensor& like) {
  return at::empty({0}, like.options());
}

OptionalTensor if_any(const Tensor& tensor) {
  return tensor.numel() != 0 ? OptionalTensor(tensor) : std::nullopt;
}

Tensor part(const Tensor& tensor, int64_t direction) {
  return tensor.dim() > 1 ? tensor.select(0, direction) : tensor;
}
OptionalTensor part(const OptionalTensor& tensor, int64_t direction) {
  return tensor.has_value() ? OptionalTensor(part(*tensor, direction)) : std::nullopt;
}

namespace {

// The states of a direction. `states` has those of all directions, concatenated in the last dimension.
Tensor states_of(const Tensor& states, int64_t direction, int64_t hidden) {
  return states.size(2) == hidden ? states : states.narrow(2, direction * hidden, hidden);
}

// The state before each step, in time order.
Tensor states_before(const Tensor& first, const Tensor& states, bool reverse) {
  const Tensor at_first = first.unsqueeze(0);
  const int64_t others = states.size(0) - 1;
  return reverse ? at::cat({states.narrow(0, 1, others), at_first}) : at::cat({at_first, states.narrow(0, 0, others)});
}

} // namespace

LayerArguments::LayerArguments(c10::ArrayRef<IValue> arguments)
    : input(arguments[0].toTensor()),
      hx(arguments[1].toTensor()),
      cx(arguments[2].toOptional<Tensor>()),
      params(arguments[3].toTensorVector()),
      mode(arguments[4].toInt()) {
  TORCH_CHECK(mode >= kRelu && mode <= kGru, "a layer's mode must be 0 to 3, but got ", mode);
  TORCH_CHECK(
      input.dim() == 3 && hx.dim() == 3 && (directions() == 1 || directions() == 2) && hx.size(1) == batch(),
      "expected sizes (time, batch, features) and (directions, batch, hidden), but got ", input.sizes(), " and ",
      hx.sizes());
  TORCH_CHECK(cx.has_value() || mode != kLstm, "an LSTM layer needs a cell state");
  const auto count = static_cast<int64_t>(params.size());
  TORCH_CHECK(
      count == 2 * directions() || count == 4 * directions(), "a layer with ", directions(),
      " directions needs two weights and either two or no biases for each, but got ", count, " parameters");
  const int64_t rows = gates_of(mode) * hidden();
  check(cx, state_sizes());
  for (int64_t i = 0; i < directions(); ++i) {
    const Direction one = direction(i);
    check(one.w_ih, {rows, input.size(2)});
    check(one.w_hh, {rows, hidden()});
    check(one.b_ih, {rows});
    check(one.b_hh, {rows});
  }
}

void LayerArguments::check(const OptionalTensor& tensor, at::IntArrayRef sizes) const {
  TORCH_CHECK(
      !tensor.has_value() ||
          (tensor->sizes() == sizes && tensor->scalar_type() == input.scalar_type() &&
           tensor->device() == input.device()),
      "expected a tensor of sizes ", sizes, " and ", input.scalar_type(), " on ", input.device(), ", but got ",
      tensor->sizes(), " and ", tensor->scalar_type(), " on ", tensor->device());
}

Direction LayerArguments::direction(int64_t i) const {
  const size_t first = i * params_of_one();
  const auto bias = [&](size_t place) {
    return params_of_one() == 4 ? OptionalTensor(params[first + place]) : std::nullopt;
  };
  return {input, part(hx, i), part(cx, i), params[first], params[first + 1], bias(2), bias(3), mode, i == 1};
}

RnnResults RnnResults::direction(int64_t i) const {
  return {states_of(out, i, hy.size(2)), part(hy, i), part(cy, i), part(saved, i)};
}

Computed::Computed(c10::ArrayRef<IValue> arguments)
    : grad(arguments[0].toTensor()),
      grad_hy(arguments[1].toTensor()),
      grad_cy(arguments[2].toTensor()),
      given(arguments.slice(3, LayerArguments::kCount)),
      results{arguments[8].toTensor(), arguments[9].toTensor(), arguments[10].toTensor(), arguments[11].toTensor()} {
  given.check(grad, given.out_sizes());
  given.check(results.out, given.out_sizes());
  given.check(grad_hy, given.state_sizes());
  given.check(results.hy, given.state_sizes());
  if (given.mode == kLstm) {
    given.check(grad_cy, given.state_sizes());
    given.check(results.cy, given.state_sizes());
  }
  const int64_t kept = saved_per_unit(given.mode);
  if (kept == 0) {
    return;
  }
  const Tensor& saved = results.saved;
  if (saved.scalar_type() == at::kByte) {
    TORCH_CHECK(
        given.mode == kLstm && given.input.scalar_type() == at::kFloat && saved.dim() == 2 && saved.is_contiguous() &&
            saved.size(0) == given.directions(),
        "`saved` has sizes that no layer returns: ", saved.sizes());
  } else if (!saves_nothing(*this)) {
    given.check(saved, {given.directions(), given.time(), given.batch(), kept * given.hidden()});
  }
}

bool saves_nothing(const Computed& computed) {
  return saved_per_unit(computed.given.mode) != 0 && computed.results.saved.numel() == 0;
}

RnnResults new_results(const LayerArguments& given, bool training) {
  const auto options = given.input.options();
  const int64_t kept = saved_per_unit(given.mode);
  return {
      at::empty(given.out_sizes(), options), at::empty(given.state_sizes(), options),
      given.mode == kLstm ? at::empty(given.state_sizes(), options) : nothing(given.input),
      training && kept != 0
          ? at::empty({given.directions(), given.time(), given.batch(), kept * given.hidden()}, options)
          : nothing(given.input)};
}

static ComputedDirection direction_of(const Computed& computed, int64_t i) {
  return {
      states_of(computed.grad, i, computed.given.hidden()), part(computed.grad_hy, i), part(computed.grad_cy, i),
      computed.given.direction(i), computed.results.direction(i)};
}

std::vector<Tensor> gradients(
    const Computed& computed, const std::function<Gradients(const ComputedDirection&)>& of_direction) {
  std::vector<Gradients> found;
  for (int64_t i = 0; i < computed.given.directions(); ++i) {
    found.push_back(of_direction(direction_of(computed, i)));
  }
  const auto both = [&](Tensor Gradients::* which) {
    return found.size() == 1 ? (found[0].*which).unsqueeze(0) : at::stack({found[0].*which, found[1].*which});
  };
  std::vector<Tensor> all{
      found.size() == 1 ? found[0].input : found[0].input.add_(found[1].input), both(&Gradients::hx),
      computed.given.mode == kLstm ? both(&Gradients::cx) : found[0].cx};
  for (const Gradients& one : found) {
    all.insert(all.end(), {one.w_ih, one.w_hh});
    if (computed.given.params_of_one() == 4) {
      all.insert(all.end(), {one.b_ih, one.b_hh});
    }
  }
  return all;
}

void layer_by_steps(const Direction& given, const RnnResults& results, bool training) {
  const int64_t time = given.time(), batch = given.batch(), hidden = given.hidden();
  const Tensor& input = given.input;
  const int64_t gates = gates_of(given.mode) * hidden, kept = saved_per_unit(given.mode);
  const Tensor from_input =
      at::mm(input.reshape({time * batch, input.size(2)}), given.w_ih.t()).view({time, batch, gates});
  // Without gradients, only the next step needs a step's cell.
  const int64_t places = training ? time : std::min<int64_t>(time, 2);
  const Tensor saved =
      training || kept == 0 ? results.saved : at::empty({places, batch, kept * hidden}, input.options());
  const Tensor to_hidden = given.w_hh.t();
  Tensor from_hidden = at::empty({batch, gates}, input.options());
  Tensor state = given.hx, cell = given.cx.value_or(Tensor());
  for (int64_t i = 0; i < time; ++i) {
    const int64_t t = given.reverse ? time - 1 - i : i;
    at::mm_out(from_hidden, state, to_hidden);
    const Tensor here = results.out.select(0, t), of_input = from_input.select(0, t);
    if (kept == 0) {
      rnn_step(here, of_input, from_hidden, given.b_ih, given.b_hh, given.mode == kRelu);
    } else if (const Tensor place = saved.select(0, t % places); given.mode == kGru) {
      gru_step(here, place, of_input, from_hidden, given.b_ih, given.b_hh, state);
    } else {
      const Tensor new_cell = place.narrow(1, 4 * hidden, hidden);
      lstm_step(here, new_cell, place.narrow(1, 0, 4 * hidden), of_input, from_hidden, given.b_ih, given.b_hh, cell);
      cell = new_cell;
    }
    state = here;
  }
  results.hy.copy_(state);
  if (given.mode == kLstm) {
    results.cy.copy_(cell);
  }
}

Gradients gradients_by_steps(const ComputedDirection& computed, const Tensor& saved) {
  const Direction& given = computed.given;
  const int64_t time = given.time(), batch = given.batch(), hidden = given.hidden();
  const Tensor &input = given.input, &out = computed.results.out;
  const Tensor of_gates = at::empty({time, batch, gates_of(given.mode) * hidden}, input.options());
  const Tensor of_hidden_gates = given.mode == kGru ? at::empty(of_gates.sizes(), input.options()) : of_gates;
  Tensor later = computed.grad_hy, of_cell = computed.grad_cy;
  for (int64_t i = time - 1; i >= 0; --i) {
    const int64_t t = given.reverse ? time - 1 - i : i, before = given.reverse ? t + 1 : t - 1;
    const Tensor gates = of_gates.select(0, t), here = computed.grad.select(0, t);
    if (given.mode == kLstm) {
      const auto cell_at = [&](int64_t at) { return saved.select(0, at).narrow(1, 4 * hidden, hidden); };
      const Tensor of_before = at::empty({batch, hidden}, input.options());
      lstm_step_backward(
          gates, of_before, here, later, of_cell, i == 0 ? *given.cx : cell_at(before), cell_at(t),
          saved.select(0, t).narrow(1, 0, 4 * hidden));
      of_cell = of_before;
      later = at::mm(gates, given.w_hh);
    } else if (given.mode == kGru) {
      const Tensor of_before = at::empty({batch, hidden}, input.options()), of_hidden = of_hidden_gates.select(0, t);
      gru_step_backward(
          gates, of_hidden, of_before, here, later, i == 0 ? given.hx : out.select(0, before), saved.select(0, t));
      later = at::addmm(of_before, of_hidden, given.w_hh);
    } else {
      rnn_step_backward(gates, here, later, out.select(0, t), given.mode == kRelu);
      later = at::mm(gates, given.w_hh);
    }
  }
  const auto flat = [&](const Tensor& tensor) { return tensor.reshape({time * batch, tensor.size(2)}); };
  const Tensor gates = flat(of_gates), hidden_gates = flat(of_hidden_gates);
  return {
      at::mm(gates, given.w_ih).view(input.sizes()),
      later,
      given.mode == kLstm ? of_cell : nothing(input),
      at::mm(gates.t(), flat(input)),
      at::mm(hidden_gates.t(), flat(states_before(given.hx, out, given.reverse))),
      given.has_biases() ? gates.sum(0) : nothing(input),
      given.has_biases() ? hidden_gates.sum(0) : nothing(input)};
}

} // namespace backplane
