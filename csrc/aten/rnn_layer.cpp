#include "aten/rnn_layer.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/mkldnn_rnn_layer_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "aten/choices.h"
#include "aten/places.h"
#include "aten/rnn_steps.h"
#include "devices/device.h"
#include "devices/openmp.h"
#include "fallback/deferred.h"
#include "fallback/fallback.h"

namespace backplane {

using at::Tensor;
using c10::IValue;
using OptionalTensor = std::optional<Tensor>;
int64_t gates_of(int64_t mode) {
  return mode == kLstm ? 4 : mode == kGru ? 3 : 1;
}

namespace {

// How many times a state's columns a step saves.
int64_t kept_of(int64_t mode) {
  return mode == kLstm ? 5 : mode == kGru ? 4 : 0;
}

// What an LSTM of float32 saves on the CPU are bytes: whose they are, then oneDNN's workspace or what steps save. Plans set memory
// aside before anybody knows how much oneDNN wants (operators/rnn.py has a bound); where that is too little, steps compute.
constexpr int64_t kHeader = 64; // so that what follows is aligned
enum Saved : uint8_t { kOfSteps, kOfOnednn };

// A layer in one direction.
struct Direction {
  Tensor input; // (time, batch, features)
  Tensor hx; // (batch, hidden)
  OptionalTensor cx; // of an LSTM
  Tensor w_ih;
  Tensor w_hh;
  OptionalTensor b_ih;
  OptionalTensor b_hh;
  int64_t mode;
  bool reverse;

  int64_t time() const {
    return input.size(0);
  }
  int64_t batch() const {
    return input.size(1);
  }
  int64_t hidden() const {
    return hx.size(1);
  }
  bool has_biases() const {
    return b_ih.has_value();
  }
};

// The part of a direction, in the first dimension; of nothing, nothing.
Tensor part(const Tensor& tensor, int64_t direction) {
  return tensor.dim() > 1 ? tensor.select(0, direction) : tensor;
}
OptionalTensor part(const OptionalTensor& tensor, int64_t direction) {
  return tensor.has_value() ? OptionalTensor(part(*tensor, direction)) : std::nullopt;
}

// The states of a direction: all are side by side.
Tensor states_of(const Tensor& states, int64_t direction, int64_t hidden) {
  return states.size(2) == hidden ? states : states.narrow(2, direction * hidden, hidden);
}

// What a layer is computed of, as all operators here take it: five arguments, in this order.
struct Given {
  static constexpr size_t kCount = 5;
  explicit Given(c10::ArrayRef<IValue> arguments)
      : input(arguments[0].toTensor()),
        hx(arguments[1].toTensor()),
        cx(arguments[2].toOptional<Tensor>()),
        params(arguments[3].toTensorVector()),
        mode(arguments[4].toInt()) {
    TORCH_CHECK(mode >= kRelu && mode <= kGru, "a layer's mode is 0 to 3, and got ", mode);
    TORCH_CHECK(
        input.dim() == 3 && hx.dim() == 3 && (directions() == 1 || directions() == 2) && hx.size(1) == batch(),
        "a layer expected (time, batch, features) and (directions, batch, hidden), and got sizes ", input.sizes(), " and ",
        hx.sizes());
    TORCH_CHECK(cx.has_value() || mode != kLstm, "an LSTM's layer expected a cell");
    const auto count = static_cast<int64_t>(params.size());
    TORCH_CHECK(
        count == 2 * directions() || count == 4 * directions(), "a layer of ", directions(),
        " directions expected two weights of each, and two biases of each, or none, and got ", count, " parameters");
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

  void check(const OptionalTensor& tensor, at::IntArrayRef sizes) const {
    TORCH_CHECK(
        !tensor.has_value() || (tensor->sizes() == sizes && tensor->scalar_type() == input.scalar_type() &&
                                tensor->device() == input.device()),
        "a layer expected sizes ", sizes, " and ", input.scalar_type(), " on ", input.device(), ", and got ",
        tensor->sizes(), " and ", tensor->scalar_type(), " on ", tensor->device());
  }

  int64_t time() const {
    return input.size(0);
  }
  int64_t batch() const {
    return input.size(1);
  }
  int64_t hidden() const {
    return hx.size(2);
  }
  int64_t directions() const {
    return hx.size(0);
  }
  size_t params_of_one() const {
    return params.size() / directions();
  }
  std::vector<int64_t> out_sizes() const {
    return {time(), batch(), directions() * hidden()};
  }
  std::vector<int64_t> state_sizes() const {
    return {directions(), batch(), hidden()};
  }

  Direction direction(int64_t i) const {
    const size_t first = i * params_of_one();
    const auto bias = [&](size_t place) {
      return params_of_one() == 4 ? OptionalTensor(params[first + place]) : std::nullopt;
    };
    return {input, part(hx, i), part(cx, i), params[first], params[first + 1], bias(2), bias(3), mode, i == 1};
  }

  Tensor input; // (time, batch, features)
  Tensor hx; // (directions, batch, hidden)
  OptionalTensor cx; // of an LSTM
  std::vector<Tensor> params; // of each direction both weights, and both biases where there are any
  int64_t mode;
};

// What a layer comes to, or a direction's part of that.
struct Results {
  Tensor out; // (time, batch, directions * hidden); of a direction (time, batch, hidden)
  Tensor hy; // (directions, batch, hidden); of a direction (batch, hidden)
  Tensor cy; // the same, of an LSTM; else nothing
  Tensor saved; // what gradients need, if anything: (directions, time, batch, kept * hidden) or bytes, (directions, bytes)

  Results direction(int64_t i) const {
    return {states_of(out, i, hy.size(2)), part(hy, i), part(cy, i), part(saved, i)};
  }
};

// What a layer came to, and the gradients of that, as backward operators take both: three arguments before `Given`'s, four behind.
struct Computed {
  static constexpr size_t kCount = 3 + Given::kCount + 4;
  explicit Computed(c10::ArrayRef<IValue> arguments)
      : grad(arguments[0].toTensor()),
        grad_hy(arguments[1].toTensor()),
        grad_cy(arguments[2].toTensor()),
        given(arguments.slice(3, Given::kCount)),
        results{
            arguments[8].toTensor(), arguments[9].toTensor(), arguments[10].toTensor(), arguments[11].toTensor()} {
    given.check(grad, given.out_sizes());
    given.check(results.out, given.out_sizes());
    given.check(grad_hy, given.state_sizes());
    given.check(results.hy, given.state_sizes());
    if (given.mode == kLstm) {
      given.check(grad_cy, given.state_sizes());
      given.check(results.cy, given.state_sizes());
    }
    const int64_t kept = kept_of(given.mode);
    if (kept == 0) {
      return;
    }
    const Tensor& saved = results.saved;
    if (saved.scalar_type() != at::kByte) {
      given.check(saved, {given.directions(), given.time(), given.batch(), kept * given.hidden()});
    } else {
      const int64_t least = kHeader + kept * given.time() * given.batch() * given.hidden() * 4;
      TORCH_CHECK(
          given.mode == kLstm && given.input.scalar_type() == at::kFloat && saved.dim() == 2 && saved.is_contiguous() &&
              saved.size(0) == given.directions() && saved.size(1) >= least,
          "a layer saved no such bytes: ", saved.sizes());
    }
  }

  Tensor grad, grad_hy, grad_cy;
  Given given;
  Results results;
};

// The same of a direction.
struct ComputedDirection {
  ComputedDirection(const Computed& all, int64_t i)
      : grad(states_of(all.grad, i, all.given.hidden())),
        grad_hy(part(all.grad_hy, i)),
        grad_cy(part(all.grad_cy, i)),
        given(all.given.direction(i)),
        results(all.results.direction(i)) {}

  Tensor grad, grad_hy, grad_cy;
  Direction given;
  Results results;
};

// Of a direction: of input, hx, cx, both weights and both biases. What there is none of has nothing.
struct Gradients {
  Tensor input, hx, cx, w_ih, w_hh, b_ih, b_hh;
};

Tensor nothing(const Tensor& like) {
  return at::empty({0}, like.options());
}

OptionalTensor if_any(const Tensor& tensor) {
  return tensor.numel() != 0 ? OptionalTensor(tensor) : std::nullopt;
}

// The state before each step, in the order of time.
Tensor states_before(const Tensor& first, const Tensor& states, bool reverse) {
  const Tensor at_first = first.unsqueeze(0);
  const int64_t others = states.size(0) - 1;
  return reverse ? at::cat({states.narrow(0, 1, others), at_first}) : at::cat({at_first, states.narrow(0, 0, others)});
}

// Fills the results. An LSTM saves its gates and its cell, a GRU what a step saves; `saved` is of steps.
void layer_by_steps(const Direction& given, const Results& results, bool training) {
  const int64_t time = given.time(), batch = given.batch(), hidden = given.hidden();
  const Tensor& input = given.input;
  const int64_t gates = gates_of(given.mode) * hidden, kept = kept_of(given.mode);
  const Tensor from_input =
      at::mm(input.reshape({time * batch, input.size(2)}), given.w_ih.t()).view({time, batch, gates});
  // Without gradients a step's cell is needed by the next one only.
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

// `saved` is of steps.
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

// On the CPU

bool is_onednn(const Direction& given) {
  return given.mode == kLstm && given.input.scalar_type() == at::kFloat && at::globalContext().userEnabledMkldnn() &&
      at::Context::hasMKLDNN();
}

// What oneDNN's layers are given: contiguous, as they look at no strides, states of one layer, and biases in any case.
Tensor of_one_layer(const Tensor& state) {
  return state.contiguous().unsqueeze(0);
}
Tensor bias_or_zeros(const OptionalTensor& bias, const Tensor& weight) {
  return bias.has_value() ? bias->contiguous() : at::zeros({weight.size(0)}, weight.options());
}

// With what it saves for gradients, of the size that it says.
Results layer_by_onednn(const Direction& given, bool training) {
  // It saves what gradients need where they are enabled, which they are not below autograd.
  const at::AutoGradMode saves(training);
  auto [out, hy, cy, workspace] = at::mkldnn_rnn_layer(
      given.input.contiguous(), given.w_ih.contiguous(), given.w_hh.contiguous(), bias_or_zeros(given.b_ih, given.w_ih),
      bias_or_zeros(given.b_hh, given.w_hh), of_one_layer(given.hx), of_one_layer(*given.cx), given.reverse,
      /*batch_sizes=*/{}, given.mode, given.hidden(), /*num_layers=*/1, given.has_biases(), /*bidirectional=*/false,
      /*batch_first=*/false, training);
  return {out, hy.squeeze(0), cy.squeeze(0), workspace};
}

Gradients gradients_by_onednn(const ComputedDirection& computed, const Tensor& workspace) {
  const Direction& given = computed.given;
  auto [of_input, of_w_ih, of_w_hh, of_b_ih, of_b_hh, of_hx, of_cx] = at::mkldnn_rnn_layer_backward(
      given.input.contiguous(), given.w_ih.contiguous(), given.w_hh.contiguous(), bias_or_zeros(given.b_ih, given.w_ih),
      bias_or_zeros(given.b_hh, given.w_hh), of_one_layer(given.hx), of_one_layer(*given.cx),
      computed.results.out.contiguous(), of_one_layer(computed.results.hy), of_one_layer(computed.results.cy),
      computed.grad.contiguous(), of_one_layer(computed.grad_hy), of_one_layer(computed.grad_cy), given.reverse, given.mode,
      given.hidden(), /*num_layers=*/1, given.has_biases(), /*train=*/true, /*bidirectional=*/false, /*batch_sizes=*/{},
      /*batch_first=*/false, workspace);
  return {
      of_input,
      of_hx.view(given.hx.sizes()),
      of_cx.view(given.hx.sizes()),
      of_w_ih,
      of_w_hh,
      given.has_biases() ? of_b_ih : nothing(given.input),
      given.has_biases() ? of_b_hh : nothing(given.input)};
}

uint8_t& saved_by(const Tensor& saved) {
  return *saved.data_ptr<uint8_t>();
}

Tensor behind_header(const Tensor& saved) {
  return saved.narrow(0, kHeader, saved.numel() - kHeader);
}

// As numbers, where they are bytes.
Tensor saved_of_steps(const Tensor& saved, const Direction& given) {
  if (saved.scalar_type() != at::kByte) {
    return saved;
  }
  const int64_t columns = kept_of(given.mode) * given.hidden();
  return behind_header(saved)
      .narrow(0, 0, given.time() * given.batch() * columns * given.input.element_size())
      .view(given.input.scalar_type())
      .view({given.time(), given.batch(), columns});
}

void direction_on_cpu(const Direction& given, const Results& results, bool training) {
  const bool in_bytes = training && results.saved.scalar_type() == at::kByte;
  if (is_onednn(given) && (in_bytes || !training)) {
    Places places{results.out, results.hy, results.cy, std::nullopt};
    if (in_bytes) {
      places.back() = behind_header(results.saved);
    }
    const auto found = [&] {
      const Offer offer(places);
      return layer_by_onednn(given, training);
    }();
    const int64_t bytes = found.saved.numel();
    if (in_bytes && places.back()->numel() >= bytes) {
      saved_by(results.saved) = kOfOnednn;
      places.back() = places.back()->narrow(0, 0, bytes);
    }
    if (!in_bytes || places.back()->numel() == bytes) {
      deliver(places, {found.out, found.hy, found.cy, found.saved});
      return;
    }
  }
  if (in_bytes) {
    saved_by(results.saved) = kOfSteps;
  }
  layer_by_steps(given, {results.out, results.hy, results.cy, saved_of_steps(results.saved, given)}, training);
}

Gradients gradients_of_direction_on_cpu(const ComputedDirection& computed) {
  const Tensor& saved = computed.results.saved;
  return saved.scalar_type() == at::kByte && saved_by(saved) == kOfOnednn
      ? gradients_by_onednn(computed, behind_header(saved))
      : gradients_by_steps(computed, saved_of_steps(saved, computed.given));
}

// Directions need nothing of each other. Steps are so small that a second thread makes a layer a quarter to a half quicker, so
// with two threads each computes a direction (docs/measurements.md).
void in_each_direction(int64_t directions, const std::function<void(int64_t)>& function) {
  const auto below_modes = [&](int64_t i) {
    const at::AutoDispatchBelowADInplaceOrView below; // other threads have modes of their own
    function(i);
  };
  if (at::get_num_threads() <= directions) {
    run_side_by_side(directions, below_modes);
    return;
  }
  for (int64_t i = 0; i < directions; ++i) {
    below_modes(i);
  }
}

void layer_on_cpu(const Given& given, const Results& results, bool training) {
  in_each_direction(given.directions(), [&](int64_t i) {
    direction_on_cpu(given.direction(i), results.direction(i), training);
  });
}

// `gradients` are filled: of input, hx, cx and the parameters; where there is nothing in one it is left out.
void gradients_on_cpu(const Computed& computed, const std::vector<Tensor>& gradients) {
  const Given& given = computed.given;
  Tensor of_input_reversed;
  in_each_direction(given.directions(), [&](int64_t i) {
    Places places{std::nullopt, part(gradients[1], i), if_any(part(gradients[2], i))};
    if (i == 0) {
      places[0] = gradients[0];
    }
    for (size_t j = 0; j < given.params_of_one(); ++j) {
      places.emplace_back(gradients[3 + i * given.params_of_one() + j]);
    }
    places.resize(7);
    const auto found = [&] {
      const Offer offer(places);
      return gradients_of_direction_on_cpu(ComputedDirection(computed, i));
    }();
    deliver(places, {found.input, found.hx, found.cx, found.w_ih, found.w_hh, found.b_ih, found.b_hh});
    if (i == 1) {
      of_input_reversed = found.input;
    }
  });
  if (of_input_reversed.defined()) {
    gradients[0].add_(of_input_reversed);
  }
}

// Results and gradients that are to be filled

// How many bytes are set aside for what oneDNN saves: operators/rnn.py has the same, and how it was found.
int64_t most_bytes(const Given& given) {
  const auto row = [](int64_t size) { return (size + 15) / 16 * 16 + 16; };
  const int64_t numbers = 8 * row(given.hidden()) + 7 * row(std::max(given.input.size(2), given.hidden()));
  return 4 * given.batch() * (given.time() + 1) * numbers + 65536 + kHeader;
}

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
    const ComputedDirection one(computed, i);
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
