#include "aten/rnn_layer.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/mkldnn_rnn_layer_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "aten/choices.h"
#include "aten/places.h"
#include "aten/rnn_steps.h"
#include "devices/device.h"
#include "fallback/deferred.h"
#include "fallback/fallback.h"

namespace backplane {

using at::Tensor;
using c10::IValue;
using OptionalTensor = std::optional<Tensor>;
using Layer = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

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

// What a layer is computed of, as all operators here take it: nine arguments, in this order.
struct Given {
  static constexpr size_t kCount = 9;
  explicit Given(c10::ArrayRef<IValue> arguments)
      : input(arguments[0].toTensor()),
        hx(arguments[1].toTensor()),
        cx(arguments[2].toOptional<Tensor>()),
        w_ih(arguments[3].toTensor()),
        w_hh(arguments[4].toTensor()),
        b_ih(arguments[5].toOptional<Tensor>()),
        b_hh(arguments[6].toOptional<Tensor>()),
        mode(arguments[7].toInt()),
        reverse(arguments[8].toBool()) {
    TORCH_CHECK(mode >= kRelu && mode <= kGru, "a layer's mode is 0 to 3, and got ", mode);
    TORCH_CHECK(
        input.dim() == 3 && hx.dim() == 2 && hx.size(0) == batch(), "a layer expected (time, batch, features) and (batch, "
        "hidden), and got sizes ", input.sizes(), " and ", hx.sizes());
    TORCH_CHECK(cx.has_value() || mode != kLstm, "an LSTM's layer expected a cell");
    TORCH_CHECK(b_ih.has_value() == b_hh.has_value(), "a layer expected two biases, or none");
    const int64_t rows = gates_of(mode) * hidden();
    check(cx, {batch(), hidden()});
    check(w_ih, {rows, input.size(2)});
    check(w_hh, {rows, hidden()});
    check(b_ih, {rows});
    check(b_hh, {rows});
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
    return hx.size(1);
  }
  bool has_biases() const {
    return b_ih.has_value();
  }

  Tensor input; // (time, batch, features)
  Tensor hx; // (batch, hidden)
  OptionalTensor cx; // of an LSTM
  Tensor w_ih;
  Tensor w_hh;
  OptionalTensor b_ih;
  OptionalTensor b_hh;
  int64_t mode;
  bool reverse;
};

// What it came to, and the gradients of that, as backward operators take both: three arguments before `Given`'s, four behind.
struct Computed {
  static constexpr size_t kCount = 3 + Given::kCount + 4;
  explicit Computed(c10::ArrayRef<IValue> arguments)
      : grad(arguments[0].toTensor()),
        grad_hy(arguments[1].toTensor()),
        grad_cy(arguments[2].toTensor()),
        given(arguments.slice(3, Given::kCount)),
        out(arguments[12].toTensor()),
        hy(arguments[13].toTensor()),
        cy(arguments[14].toTensor()),
        saved(arguments[15].toTensor()) {
    const std::vector<int64_t> states{given.time(), given.batch(), given.hidden()}, state{given.batch(), given.hidden()};
    given.check(grad, states);
    given.check(out, states);
    given.check(grad_hy, state);
    given.check(hy, state);
    if (given.mode == kLstm) {
      given.check(grad_cy, state);
      given.check(cy, state);
    }
    const int64_t kept = kept_of(given.mode);
    if (kept == 0) {
      return;
    }
    if (saved.scalar_type() != at::kByte) {
      given.check(saved, {given.time(), given.batch(), kept * given.hidden()});
    } else {
      TORCH_CHECK(
          given.mode == kLstm && given.input.scalar_type() == at::kFloat && saved.dim() == 1 && saved.is_contiguous() &&
              saved.numel() >= kHeader + kept * out.numel() * 4,
          "a layer saved no such bytes: ", saved.sizes());
    }
  }

  Tensor grad, grad_hy, grad_cy;
  Given given;
  Tensor out, hy, cy, saved;
};

Tensor nothing(const Tensor& like) {
  return at::empty({0}, like.options());
}

// The state before each step, in the order of time.
Tensor states_before(const Tensor& first, const Tensor& states, bool reverse) {
  const Tensor at_first = first.unsqueeze(0);
  const int64_t others = states.size(0) - 1;
  return reverse ? at::cat({states.narrow(0, 1, others), at_first}) : at::cat({at_first, states.narrow(0, 0, others)});
}

// Returns the states, (time, batch, hidden), the last state, the last cell, and what gradients need: nothing unless training.
// An LSTM saves its gates and its cell, a GRU what a step saves.
Layer layer_by_steps(const Given& given, bool training) {
  const int64_t time = given.time(), batch = given.batch(), hidden = given.hidden();
  const Tensor& input = given.input;
  const int64_t gates = gates_of(given.mode) * hidden, kept = kept_of(given.mode);
  const Tensor from_input =
      at::mm(input.reshape({time * batch, input.size(2)}), given.w_ih.t()).view({time, batch, gates});
  const Tensor out = at::empty({time, batch, hidden}, input.options());
  // Without gradients a step's cell is needed by the next one only.
  const int64_t places = training ? time : std::min<int64_t>(time, 2);
  const Tensor saved = kept == 0 ? nothing(input) : at::empty({places, batch, kept * hidden}, input.options());
  const Tensor to_hidden = given.w_hh.t();
  Tensor from_hidden = at::empty({batch, gates}, input.options());
  Tensor state = given.hx, cell = given.cx.value_or(Tensor());
  for (int64_t i = 0; i < time; ++i) {
    const int64_t t = given.reverse ? time - 1 - i : i;
    at::mm_out(from_hidden, state, to_hidden);
    const Tensor here = out.select(0, t), of_input = from_input.select(0, t);
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
  return {
      out, state.clone(), given.mode == kLstm ? cell.clone() : nothing(input), training ? saved : nothing(input)};
}

// The gradients of input, hx, cx, both weights and both biases. `saved` is of steps.
Gradients gradients_by_steps(const Computed& computed, const Tensor& saved) {
  const Given& given = computed.given;
  const int64_t time = given.time(), batch = given.batch(), hidden = given.hidden();
  const Tensor &input = given.input, &out = computed.out;
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

bool is_onednn(const Given& given) {
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

Layer layer_by_onednn(const Given& given, bool training) {
  // It saves what gradients need where they are enabled, which they are not below autograd.
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::AutoGradMode saves(training);
  auto [out, hy, cy, workspace] = at::mkldnn_rnn_layer(
      given.input.contiguous(), given.w_ih.contiguous(), given.w_hh.contiguous(), bias_or_zeros(given.b_ih, given.w_ih),
      bias_or_zeros(given.b_hh, given.w_hh), of_one_layer(given.hx), of_one_layer(*given.cx), given.reverse,
      /*batch_sizes=*/{}, given.mode, given.hidden(), /*num_layers=*/1, given.has_biases(), /*bidirectional=*/false,
      /*batch_first=*/false, training);
  return {out, hy.squeeze(0), cy.squeeze(0), training ? workspace : nothing(given.input)};
}

Gradients gradients_by_onednn(const Computed& computed, const Tensor& workspace) {
  const Given& given = computed.given;
  auto [of_input, of_w_ih, of_w_hh, of_b_ih, of_b_hh, of_hx, of_cx] = at::mkldnn_rnn_layer_backward(
      given.input.contiguous(), given.w_ih.contiguous(), given.w_hh.contiguous(), bias_or_zeros(given.b_ih, given.w_ih),
      bias_or_zeros(given.b_hh, given.w_hh), of_one_layer(given.hx), of_one_layer(*given.cx), computed.out,
      of_one_layer(computed.hy), of_one_layer(computed.cy), computed.grad.contiguous(), of_one_layer(computed.grad_hy),
      of_one_layer(computed.grad_cy), given.reverse, given.mode, given.hidden(), /*num_layers=*/1, given.has_biases(),
      /*train=*/true, /*bidirectional=*/false, /*batch_sizes=*/{}, /*batch_first=*/false, workspace);
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

Tensor saved_of_steps(const Tensor& saved, const Tensor& out) {
  const int64_t numbers = out.numel() * 5;
  return saved.narrow(0, kHeader, numbers * out.element_size())
      .view(out.scalar_type())
      .view({out.size(0), out.size(1), 5 * out.size(2)});
}

// With a `place`, what is saved in bytes goes there.
Layer layer_on_cpu(const Given& given, bool training, const OptionalTensor& place = std::nullopt) {
  const auto place_of = [&](int64_t bytes) {
    return place.has_value() ? *place : at::empty({kHeader + bytes}, given.input.options().dtype(at::kByte));
  };
  if (is_onednn(given)) {
    auto [out, hy, cy, workspace] = layer_by_onednn(given, training);
    if (!training) {
      return {out, hy, cy, workspace};
    }
    if (const Tensor saved = place_of(workspace.numel()); saved.numel() >= kHeader + workspace.numel()) {
      saved_by(saved) = kOfOnednn;
      saved.narrow(0, kHeader, workspace.numel()).copy_(workspace);
      return {out, hy, cy, saved};
    }
  }
  auto [out, hy, cy, states] = layer_by_steps(given, training);
  if (given.mode != kLstm || given.input.scalar_type() != at::kFloat || !training) {
    return {out, hy, cy, states};
  }
  const Tensor saved = place_of(static_cast<int64_t>(states.nbytes()));
  saved_by(saved) = kOfSteps;
  saved_of_steps(saved, out).copy_(states);
  return {out, hy, cy, saved};
}

Gradients gradients_on_cpu(const Computed& computed) {
  const Tensor& saved = computed.saved;
  if (saved.scalar_type() != at::kByte) {
    return gradients_by_steps(computed, saved);
  }
  return saved_by(saved) == kOfSteps
      ? gradients_by_steps(computed, saved_of_steps(saved, computed.out))
      : gradients_by_onednn(computed, saved.narrow(0, kHeader, saved.numel() - kHeader));
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

template <class Results>
void answer(Stack* stack, size_t arguments, const Results& results) {
  torch::jit::drop(*stack, arguments);
  std::apply([&](const auto&... each) { torch::jit::push(*stack, each...); }, results);
}

void layer_of_cpu(const OperatorHandle&, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, Given::kCount + 1);
  answer(stack, Given::kCount + 1, layer_on_cpu(Given(arguments), arguments.back().toBool()));
}

// Places for results in which there is anything.
template <class Results>
void push_places(Stack& stack, const Results& results) {
  const auto place = [](const Tensor& one) { return one.numel() != 0 ? OptionalTensor(one) : std::nullopt; };
  std::apply([&](const auto&... each) { torch::jit::push(stack, place(each)...); }, results);
}

// How many bytes are set aside for what oneDNN saves: operators/rnn.py has the same, and how it was found.
int64_t most_bytes(const Given& given) {
  const auto row = [](int64_t size) { return (size + 15) / 16 * 16 + 16; };
  const int64_t numbers = 8 * row(given.hidden()) + 7 * row(std::max(given.input.size(2), given.hidden()));
  return 4 * given.batch() * (given.time() + 1) * numbers + 65536 + kHeader;
}

// In the order of the stream, on a host device.
Layer layer_later(const Given& given, c10::ArrayRef<IValue> arguments) {
  const auto options = given.input.options();
  const int64_t time = given.time(), batch = given.batch(), hidden = given.hidden(), kept = kept_of(given.mode);
  const bool training = arguments.back().toBool(), in_bytes = given.mode == kLstm && options.dtype() == at::kFloat;
  const Tensor saved = !training || kept == 0 ? nothing(given.input)
      : in_bytes                              ? at::empty({most_bytes(given)}, options.dtype(at::kByte))
                                              : at::empty({time, batch, kept * hidden}, options);
  const Layer results{
      at::empty({time, batch, hidden}, options), at::empty({batch, hidden}, options),
      given.mode == kLstm ? at::empty({batch, hidden}, options) : nothing(given.input), saved};
  Stack stack(arguments.begin(), arguments.end());
  push_places(stack, results);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("backplane::host_rnn_layer", "");
  op.callBoxed(stack);
  return results;
}

Gradients gradients_later(const Given& given, c10::ArrayRef<IValue> arguments) {
  const auto like = [&](const OptionalTensor& one) {
    return one.has_value() ? at::empty(one->sizes(), one->options()) : nothing(given.input);
  };
  const Gradients results{
      like(given.input), like(given.hx), like(given.cx), like(given.w_ih), like(given.w_hh), like(given.b_ih),
      like(given.b_hh)};
  Stack stack(arguments.begin(), arguments.end());
  push_places(stack, results);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("backplane::host_rnn_layer_backward", "");
  op.callBoxed(stack);
  return results;
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
  answer(stack, Given::kCount + 1, layer_by_steps(given, arguments.back().toBool()));
}

void gradients_of_bp(const OperatorHandle& op, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, Computed::kCount);
  const Computed computed(arguments);
  if (is_later_host_call(computed.given.input)) {
    answer(stack, Computed::kCount, gradients_later(computed.given, arguments));
    return;
  }
  if (is_host_call(computed.given.input) || computed.saved.scalar_type() == at::kByte) { // bytes are a host's layer's
    run_on_cpu(op, op, stack);
    return;
  }
  answer(stack, Computed::kCount, gradients_by_steps(computed, computed.saved));
}

namespace {

void gradients_of_cpu(const OperatorHandle&, Stack* stack) {
  answer(stack, Computed::kCount, gradients_on_cpu(Computed(torch::jit::last(*stack, Computed::kCount))));
}

// The same with results that go where further arguments say, if anywhere: for planners.

Places places_of(c10::ArrayRef<IValue> arguments) {
  Places places;
  for (const IValue& one : arguments) {
    places.push_back(one.toOptional<Tensor>());
  }
  return places;
}

template <class Results>
std::vector<Tensor> listed(const Results& results) {
  return std::apply([](const auto&... each) { return std::vector<Tensor>{each...}; }, results);
}

void layer_to_places(const OperatorHandle&, Stack* stack) {
  constexpr size_t kInputs = Given::kCount + 1, kPlaces = 4;
  const auto arguments = torch::jit::last(*stack, kInputs + kPlaces);
  const Places places = places_of(arguments.slice(kInputs));
  const OptionalTensor& saved = places.back();
  const bool in_bytes = saved.has_value() && saved->scalar_type() == at::kByte;
  Places offered = places;
  if (in_bytes) {
    offered.back() = saved->narrow(0, kHeader, saved->numel() - kHeader);
  }
  deliver(places, [&] {
    const Offer offer(offered);
    return listed(
        layer_on_cpu(Given(arguments), arguments[kInputs - 1].toBool(), in_bytes ? saved : std::nullopt));
  }());
  torch::jit::drop(*stack, kInputs + kPlaces);
}

void gradients_to_places(const OperatorHandle&, Stack* stack) {
  constexpr size_t kPlaces = 7;
  const auto arguments = torch::jit::last(*stack, Computed::kCount + kPlaces);
  const Places places = places_of(arguments.slice(Computed::kCount));
  deliver(places, [&] {
    const Offer offer(places);
    return listed(gradients_on_cpu(Computed(arguments)));
  }());
  torch::jit::drop(*stack, Computed::kCount + kPlaces);
}

TORCH_LIBRARY_FRAGMENT(backplane, m) {
  m.def(
      "rnn_layer(Tensor input, Tensor hx, Tensor? cx, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, int mode, "
      "bool reverse, bool training) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "rnn_layer_backward(Tensor grad, Tensor grad_hy, Tensor grad_cy, Tensor input, Tensor hx, Tensor? cx, Tensor w_ih, "
      "Tensor w_hh, Tensor? b_ih, Tensor? b_hh, int mode, bool reverse, Tensor out, Tensor hy, Tensor cy, Tensor saved) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "host_rnn_layer(Tensor input, Tensor hx, Tensor? cx, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, "
      "int mode, bool reverse, bool training, *, Tensor(a!) out, Tensor(b!) hy, Tensor(c!)? cy, Tensor(d!)? saved) -> ()");
  m.def(
      "host_rnn_layer_backward(Tensor grad, Tensor grad_hy, Tensor grad_cy, Tensor input, Tensor hx, Tensor? cx, "
      "Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, int mode, bool reverse, Tensor out, Tensor hy, Tensor cy, "
      "Tensor saved, *, Tensor(a!) of_input, Tensor(b!) of_hx, Tensor(c!)? of_cx, Tensor(d!) of_w_ih, Tensor(e!) of_w_hh, "
      "Tensor(f!)? of_b_ih, Tensor(g!)? of_b_hh) -> ()");
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
  m.impl("host_rnn_layer_backward", torch::CppFunction::makeFromBoxedFunction<&leave_places<Computed::kCount + 7>>());
}

TORCH_LIBRARY_IMPL(backplane, PrivateUse1, m) {
  m.impl("rnn_layer", torch::CppFunction::makeFromBoxedFunction<&layer_of_bp>());
  m.impl("rnn_layer_backward", torch::CppFunction::makeFromBoxedFunction<&gradients_of_bp>());
}

} // namespace
} // namespace backplane
