// Recurrent layers: LSTM, GRU and RNN over sequences that are not packed. PyTorch composes them of products and fused cells, step
// by step, on every device but the CPU. Here the input's gates of all steps are one product, and a step is one product and one
// kernel (rnn_steps.cpp); the gradients of weights are one product each. Where the host sees a processor's memory it computes a
// whole layer in stream order (torch_backplane/operators/rnn.py), an LSTM's by oneDNN.
//
// What PyTorch's composition serves besides stays with it: packed sequences, projections, forward and second derivatives,
// transforms and modes of Python's; and it has the errors.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gru_native.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/mkldnn_rnn_layer_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rnn_relu_native.h>
#include <ATen/ops/rnn_tanh_native.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "aten/choices.h"
#include "aten/rnn_steps.h"
#include "devices/device.h"
#include "fallback/fallback.h"

namespace backplane {
namespace {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;
using Layer = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

enum Mode : int64_t { kRelu, kTanh, kLstm, kGru }; // PyTorch's numbers

int64_t gates_of(int64_t mode) {
  return mode == kLstm ? 4 : mode == kGru ? 3 : 1;
}

Tensor nothing(const Tensor& like) {
  return at::empty({0}, like.options());
}

// The state before each step, in the order of time.
Tensor states_before(const Tensor& first, const Tensor& states, bool reverse) {
  const Tensor at_first = first.unsqueeze(0);
  const int64_t others = states.size(0) - 1;
  return reverse ? at::cat({states.narrow(0, 1, others), at_first}) : at::cat({at_first, states.narrow(0, 0, others)});
}

// input: (time, batch, features); hx, cx: (batch, hidden). Returns the states, (time, batch, hidden), the last state, the last
// cell, and what gradients need: nothing unless training. An LSTM saves its gates and its cell, a GRU what a step saves.
Layer layer_by_steps(
    const Tensor& input,
    const Tensor& hx,
    const OptionalTensor& cx,
    const Tensor& w_ih,
    const Tensor& w_hh,
    const OptionalTensor& b_ih,
    const OptionalTensor& b_hh,
    int64_t mode,
    bool reverse,
    bool training) {
  const int64_t time = input.size(0), batch = input.size(1), hidden = hx.size(1);
  const Tensor from_input =
      at::mm(input.reshape({time * batch, input.size(2)}), w_ih.t()).view({time, batch, gates_of(mode) * hidden});
  const Tensor out = at::empty({time, batch, hidden}, input.options());
  const int64_t kept = mode == kLstm ? 5 : mode == kGru ? 4 : 0;
  // Without gradients a step's cell is needed by the next one only.
  const int64_t places = training ? time : std::min<int64_t>(time, 2);
  const Tensor saved = kept == 0 ? nothing(input) : at::empty({places, batch, kept * hidden}, input.options());
  const Tensor to_hidden = w_hh.t();
  Tensor from_hidden = at::empty({batch, gates_of(mode) * hidden}, input.options());
  Tensor state = hx, cell = cx.value_or(Tensor());
  for (int64_t i = 0; i < time; ++i) {
    const int64_t t = reverse ? time - 1 - i : i;
    at::mm_out(from_hidden, state, to_hidden);
    const Tensor gates = from_input.select(0, t), here = out.select(0, t);
    if (kept == 0) {
      rnn_step(here, gates, from_hidden, b_ih, b_hh, mode == kRelu);
    } else if (const Tensor place = saved.select(0, t % places); mode == kGru) {
      gru_step(here, place, gates, from_hidden, b_ih, b_hh, state);
    } else {
      const Tensor new_cell = place.narrow(1, 4 * hidden, hidden);
      lstm_step(here, new_cell, place.narrow(1, 0, 4 * hidden), gates, from_hidden, b_ih, b_hh, cell);
      cell = new_cell;
    }
    state = here;
  }
  return {out, state.clone(), mode == kLstm ? cell.clone() : nothing(input), training ? saved : nothing(input)};
}

// The gradients of input, hx, cx, both weights and both biases.
Gradients gradients_by_steps(
    const Tensor& grad,
    const Tensor& grad_hy,
    const Tensor& grad_cy,
    const Tensor& input,
    const Tensor& hx,
    const OptionalTensor& cx,
    const Tensor& w_ih,
    const Tensor& w_hh,
    bool has_biases,
    const Tensor& out,
    const Tensor& saved,
    int64_t mode,
    bool reverse) {
  const int64_t time = input.size(0), batch = input.size(1), hidden = hx.size(1);
  const Tensor of_gates = at::empty({time, batch, gates_of(mode) * hidden}, input.options());
  const Tensor of_hidden_gates = mode == kGru ? at::empty(of_gates.sizes(), input.options()) : of_gates;
  Tensor later = grad_hy, of_cell = grad_cy;
  for (int64_t i = time - 1; i >= 0; --i) {
    const int64_t t = reverse ? time - 1 - i : i, before = reverse ? t + 1 : t - 1;
    const Tensor gates = of_gates.select(0, t), here = grad.select(0, t);
    if (mode == kLstm) {
      const auto cell_at = [&](int64_t at) { return saved.select(0, at).narrow(1, 4 * hidden, hidden); };
      const Tensor of_before = at::empty({batch, hidden}, input.options());
      lstm_step_backward(
          gates, of_before, here, later, of_cell, i == 0 ? *cx : cell_at(before), cell_at(t),
          saved.select(0, t).narrow(1, 0, 4 * hidden));
      of_cell = of_before;
      later = at::mm(gates, w_hh);
    } else if (mode == kGru) {
      const Tensor of_before = at::empty({batch, hidden}, input.options()), of_hidden = of_hidden_gates.select(0, t);
      gru_step_backward(
          gates, of_hidden, of_before, here, later, i == 0 ? hx : out.select(0, before), saved.select(0, t));
      later = at::addmm(of_before, of_hidden, w_hh);
    } else {
      rnn_step_backward(gates, here, later, out.select(0, t), mode == kRelu);
      later = at::mm(gates, w_hh);
    }
  }
  const auto flat = [&](const Tensor& tensor) { return tensor.reshape({time * batch, tensor.size(2)}); };
  const Tensor gates = flat(of_gates), hidden_gates = flat(of_hidden_gates);
  return {
      at::mm(gates, w_ih).view(input.sizes()),
      later,
      mode == kLstm ? of_cell : nothing(input),
      at::mm(gates.t(), flat(input)),
      at::mm(hidden_gates.t(), flat(states_before(hx, out, reverse))),
      has_biases ? gates.sum(0) : nothing(input),
      has_biases ? hidden_gates.sum(0) : nothing(input)};
}

// On the CPU

bool is_onednn(const Tensor& input, int64_t mode) {
  return mode == kLstm && input.scalar_type() == at::kFloat && at::globalContext().userEnabledMkldnn() &&
      at::Context::hasMKLDNN();
}

// What oneDNN's layers are given: contiguous, as they look at no strides, states of one layer, and biases in any case.
Tensor of_one_layer(const Tensor& state) {
  return state.contiguous().unsqueeze(0);
}
Tensor bias_or_zeros(const OptionalTensor& bias, const Tensor& weight) {
  return bias.has_value() ? bias->contiguous() : at::zeros({weight.size(0)}, weight.options());
}

Layer layer_by_onednn(
    const Tensor& input,
    const Tensor& hx,
    const OptionalTensor& cx,
    const Tensor& w_ih,
    const Tensor& w_hh,
    const OptionalTensor& b_ih,
    const OptionalTensor& b_hh,
    int64_t mode,
    bool reverse,
    bool training) {
  // It saves what gradients need where they are enabled, which they are not below autograd.
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::AutoGradMode saves(training);
  auto [out, hy, cy, workspace] = at::mkldnn_rnn_layer(
      input.contiguous(), w_ih.contiguous(), w_hh.contiguous(), bias_or_zeros(b_ih, w_ih), bias_or_zeros(b_hh, w_hh),
      of_one_layer(hx), of_one_layer(*cx), reverse, /*batch_sizes=*/{}, mode, hx.size(1), /*num_layers=*/1,
      b_ih.has_value(), /*bidirectional=*/false, /*batch_first=*/false, training);
  return {out, hy.squeeze(0), cy.squeeze(0), training ? workspace : nothing(input)};
}

// What an LSTM of float32 saves are bytes: whose they are, then oneDNN's workspace or what steps save. Plans set memory aside
// before anybody knows how much oneDNN wants (operators/rnn.py has a bound); where that is too little, steps compute.
constexpr int64_t kHeader = 64; // so that what follows is aligned
enum Saved : uint8_t { kOfSteps, kOfOnednn };

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
Layer layer_on_cpu(
    const Tensor& input,
    const Tensor& hx,
    const OptionalTensor& cx,
    const Tensor& w_ih,
    const Tensor& w_hh,
    const OptionalTensor& b_ih,
    const OptionalTensor& b_hh,
    int64_t mode,
    bool reverse,
    bool training,
    const OptionalTensor& place) {
  const auto run = [&](const auto& layer) {
    return layer(input, hx, cx, w_ih, w_hh, b_ih, b_hh, mode, reverse, training);
  };
  const bool in_bytes = mode == kLstm && input.scalar_type() == at::kFloat && training;
  if (is_onednn(input, mode)) {
    auto [out, hy, cy, workspace] = run(&layer_by_onednn);
    if (!training) {
      return {out, hy, cy, workspace};
    }
    const int64_t bytes = kHeader + workspace.numel();
    if (!place.has_value() || place->numel() >= bytes) {
      const Tensor saved = place.has_value() ? *place : at::empty({bytes}, workspace.options());
      saved_by(saved) = kOfOnednn;
      saved.narrow(0, kHeader, workspace.numel()).copy_(workspace);
      return {out, hy, cy, saved};
    }
  }
  auto [out, hy, cy, states] = run(&layer_by_steps);
  if (!in_bytes) {
    return {out, hy, cy, states};
  }
  const Tensor saved = place.has_value()
      ? *place
      : at::empty({kHeader + states.numel() * static_cast<int64_t>(states.element_size())}, input.options().dtype(at::kByte));
  saved_by(saved) = kOfSteps;
  saved_of_steps(saved, out).copy_(states);
  return {out, hy, cy, saved};
}

Gradients gradients_on_cpu(
    const Tensor& grad,
    const Tensor& grad_hy,
    const Tensor& grad_cy,
    const Tensor& input,
    const Tensor& hx,
    const OptionalTensor& cx,
    const Tensor& w_ih,
    const Tensor& w_hh,
    const OptionalTensor& b_ih,
    const OptionalTensor& b_hh,
    const Tensor& out,
    const Tensor& hy,
    const Tensor& cy,
    const Tensor& saved,
    int64_t mode,
    bool reverse) {
  const bool in_bytes = saved.scalar_type() == at::kByte;
  if (!in_bytes || saved_by(saved) == kOfSteps) {
    return gradients_by_steps(
        grad, grad_hy, grad_cy, input, hx, cx, w_ih, w_hh, b_ih.has_value(), out,
        in_bytes ? saved_of_steps(saved, out) : saved, mode, reverse);
  }
  auto [of_input, of_w_ih, of_w_hh, of_b_ih, of_b_hh, of_hx, of_cx] = at::mkldnn_rnn_layer_backward(
      input.contiguous(), w_ih.contiguous(), w_hh.contiguous(), bias_or_zeros(b_ih, w_ih), bias_or_zeros(b_hh, w_hh),
      of_one_layer(hx), of_one_layer(*cx), out, of_one_layer(hy), of_one_layer(cy), grad.contiguous(),
      of_one_layer(grad_hy), of_one_layer(grad_cy), reverse, mode, hx.size(1), /*num_layers=*/1, b_ih.has_value(), /*train=*/true,
      /*bidirectional=*/false, /*batch_sizes=*/{}, /*batch_first=*/false,
      saved.narrow(0, kHeader, saved.numel() - kHeader));
  const bool has_biases = b_ih.has_value();
  return {
      of_input, of_hx.view(hx.sizes()), of_cx.view(hx.sizes()), of_w_ih, of_w_hh,
      has_biases ? of_b_ih : nothing(input), has_biases ? of_b_hh : nothing(input)};
}

template <class Results>
void copy_to(const Results& found, const std::vector<OptionalTensor>& places) {
  std::apply(
      [&](const auto&... results) {
        size_t i = 0;
        const auto copy = [](const OptionalTensor& place, const Tensor& result) {
          if (place.has_value()) {
            place->copy_(result);
          }
        };
        (copy(places[i++], results), ...);
      },
      found);
}

// As these, with results that go where arguments say, if anywhere: for planners.
void host_layer(
    const Tensor& input,
    const Tensor& hx,
    const OptionalTensor& cx,
    const Tensor& w_ih,
    const Tensor& w_hh,
    const OptionalTensor& b_ih,
    const OptionalTensor& b_hh,
    int64_t mode,
    bool reverse,
    bool training,
    const Tensor& out,
    const Tensor& hy,
    const OptionalTensor& cy,
    const OptionalTensor& saved) {
  const bool in_place = saved.has_value() && saved->scalar_type() == at::kByte;
  copy_to(
      layer_on_cpu(
          input, hx, cx, w_ih, w_hh, b_ih, b_hh, mode, reverse, training, in_place ? saved : std::nullopt),
      {out, hy, cy, in_place ? std::nullopt : saved});
}

void host_gradients(
    const Tensor& grad,
    const Tensor& grad_hy,
    const Tensor& grad_cy,
    const Tensor& input,
    const Tensor& hx,
    const OptionalTensor& cx,
    const Tensor& w_ih,
    const Tensor& w_hh,
    const OptionalTensor& b_ih,
    const OptionalTensor& b_hh,
    const Tensor& out,
    const Tensor& hy,
    const Tensor& cy,
    const Tensor& saved,
    int64_t mode,
    bool reverse,
    const Tensor& of_input,
    const Tensor& of_hx,
    const OptionalTensor& of_cx,
    const Tensor& of_w_ih,
    const Tensor& of_w_hh,
    const OptionalTensor& of_b_ih,
    const OptionalTensor& of_b_hh) {
  copy_to(
      gradients_on_cpu(
          grad, grad_hy, grad_cy, input, hx, cx, w_ih, w_hh, b_ih, b_hh, out, hy, cy, saved, mode, reverse),
      {of_input, of_hx, of_cx, of_w_ih, of_w_hh, of_b_ih, of_b_hh});
}

// On bp: whole layers of the host's, by planners on devices that run kernels, or steps.

bool runs_kernels(const Tensor& tensor) {
  return !device(tensor.device().index()).properties().dialect.empty();
}

bool by_steps(const Tensor& tensor) {
  return runs_kernels(tensor) && !computes_on_host(tensor.device().index());
}

Layer layer_on_bp(
    const Tensor& input,
    const Tensor& hx,
    const OptionalTensor& cx,
    const Tensor& w_ih,
    const Tensor& w_hh,
    const OptionalTensor& b_ih,
    const OptionalTensor& b_hh,
    int64_t mode,
    bool reverse,
    bool training) {
  if (runs_kernels(input)) {
    return layer_by_steps(input, hx, cx, w_ih, w_hh, b_ih, b_hh, mode, reverse, training);
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("backplane::rnn_layer", "");
  torch::jit::Stack stack;
  torch::jit::push(stack, input, hx, cx, w_ih, w_hh, b_ih, b_hh, mode, reverse, training);
  run_on_cpu(op, op, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(), stack[3].toTensor()};
}

Gradients gradients_on_bp(
    const Tensor& grad,
    const Tensor& grad_hy,
    const Tensor& grad_cy,
    const Tensor& input,
    const Tensor& hx,
    const OptionalTensor& cx,
    const Tensor& w_ih,
    const Tensor& w_hh,
    const OptionalTensor& b_ih,
    const OptionalTensor& b_hh,
    const Tensor& out,
    const Tensor& hy,
    const Tensor& cy,
    const Tensor& saved,
    int64_t mode,
    bool reverse) {
  if (runs_kernels(input)) {
    return gradients_by_steps(
        grad, grad_hy, grad_cy, input, hx, cx, w_ih, w_hh, b_ih.has_value(), out, saved, mode, reverse);
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("backplane::rnn_layer_backward", "");
  torch::jit::Stack stack;
  torch::jit::push(
      stack, grad, grad_hy, grad_cy, input, hx, cx, w_ih, w_hh, b_ih, b_hh, out, hy, cy, saved, mode, reverse);
  run_on_cpu(op, op, &stack);
  const auto of = [&](size_t i) { return stack[i].toTensor(); };
  return {of(0), of(1), of(2), of(3), of(4), of(5), of(6)};
}

// With gradients

struct Arguments {
  TensorList params; // of each layer and direction the weights of input and state, and both biases where there are any
  int64_t mode;
  bool has_biases;
  int64_t num_layers;
  double dropout;
  bool train;
  bool bidirectional;
  bool batch_first;
};

using States = std::tuple<Tensor, Tensor, Tensor>; // all states, the last state, and of LSTM the last cell

// What PyTorch makes of the layers, on any device.
States composed(const Tensor& input, const Tensor& hx, const OptionalTensor& cx, const Arguments& with) {
  const auto run = [&](const auto& function) -> States {
    auto [out, hy] = function(
        input, hx, with.params, with.has_biases, with.num_layers, with.dropout, with.train, with.bidirectional,
        with.batch_first);
    return {out, hy, Tensor()};
  };
  using Function = std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, TensorList, bool, int64_t, double, bool, bool, bool);
  switch (with.mode) {
    case kLstm: {
      const Tensor both[] = {hx, *cx};
      return at::native::lstm(
          input, TensorList(both, 2), with.params, with.has_biases, with.num_layers, with.dropout, with.train,
          with.bidirectional, with.batch_first);
    }
    case kGru:
      return run(static_cast<Function*>(&at::native::gru));
    case kTanh:
      return run(static_cast<Function*>(&at::native::rnn_tanh));
    default:
      return run(static_cast<Function*>(&at::native::rnn_relu));
  }
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// One layer in one direction.
class RnnLayer final : public torch::autograd::Function<RnnLayer> {
 public:
  static variable_list forward(
      AutogradContext* ctx,
      const Tensor& input,
      const Tensor& hx,
      const OptionalTensor& cx,
      const Tensor& w_ih,
      const Tensor& w_hh,
      const OptionalTensor& b_ih,
      const OptionalTensor& b_hh,
      int64_t mode,
      bool reverse,
      bool training) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("backplane::rnn_layer", "")
                               .typed<decltype(layer_on_bp)>();
    auto [out, hy, cy, saved] = by_steps(input)
        ? layer_by_steps(input, hx, cx, w_ih, w_hh, b_ih, b_hh, mode, reverse, training)
        : op.call(input, hx, cx, w_ih, w_hh, b_ih, b_hh, mode, reverse, training);
    const auto or_none = [](const OptionalTensor& tensor) { return tensor.value_or(Tensor()); };
    ctx->save_for_backward(
        {input, hx, or_none(cx), w_ih, w_hh, or_none(b_ih), or_none(b_hh), out, hy, cy, saved});
    ctx->saved_data["mode"] = mode;
    ctx->saved_data["reverse"] = reverse;
    return {out, hy, cy};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const int64_t mode = ctx->saved_data["mode"].toInt();
    const bool reverse = ctx->saved_data["reverse"].toBool();
    if (at::GradMode::is_enabled()) {
      return differentiable(saved, grads, mode, reverse);
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("backplane::rnn_layer_backward", "")
                               .typed<decltype(gradients_on_bp)>();
    const OptionalTensor cx = optional(saved[2]), b_ih = optional(saved[5]), b_hh = optional(saved[6]);
    auto [of_input, of_hx, of_cx, of_w_ih, of_w_hh, of_b_ih, of_b_hh] = by_steps(saved[0])
        ? gradients_by_steps(
              grads[0], grads[1], grads[2], saved[0], saved[1], cx, saved[3], saved[4], b_ih.has_value(), saved[7],
              saved[10], mode, reverse)
        : op.call(
              grads[0], grads[1], grads[2], saved[0], saved[1], cx, saved[3], saved[4], b_ih, b_hh, saved[7], saved[8],
              saved[9], saved[10], mode, reverse);
    const auto if_given = [](const Tensor& given, const Tensor& gradient) { return given.defined() ? gradient : Tensor(); };
    return {
        of_input, of_hx, if_given(saved[2], of_cx), of_w_ih, of_w_hh, if_given(saved[5], of_b_ih),
        if_given(saved[6], of_b_hh), Tensor(), Tensor(), Tensor()};
  }

 private:
  static OptionalTensor optional(const Tensor& tensor) {
    return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
  }

  // The gradients of what PyTorch composes, which have gradients themselves.
  static variable_list differentiable(const variable_list& saved, const variable_list& grads, int64_t mode, bool reverse) {
    variable_list given(saved.begin(), saved.begin() + 7), found(10), inputs;
    std::vector<size_t> places;
    for (size_t i = 0; i < given.size(); ++i) {
      if (given[i].defined()) {
        given[i] = given[i].view_as(given[i]); // so that what one was computed of is not part of another's gradient
      }
      if (given[i].defined() && given[i].requires_grad()) {
        inputs.push_back(given[i]);
        places.push_back(i);
      }
    }
    const bool has_biases = given[5].defined();
    const variable_list params(given.begin() + 3, given.begin() + (has_biases ? 7 : 5));
    const auto ordered = [&](const Tensor& sequence) { return reverse ? sequence.flip(0) : sequence; };
    const OptionalTensor cx = given[2].defined() ? OptionalTensor(given[2].unsqueeze(0)) : std::nullopt;
    const auto [out, hy, cy] = composed(
        ordered(given[0]), given[1].unsqueeze(0), cx,
        {params, mode, has_biases, /*num_layers=*/1, /*dropout=*/0, /*train=*/true, /*bidirectional=*/false,
         /*batch_first=*/false});
    variable_list outputs{ordered(out), hy.squeeze(0)}, cotangents{grads[0], grads[1]};
    if (cx.has_value()) {
      outputs.push_back(cy.squeeze(0));
      cotangents.push_back(grads[2]);
    }
    const variable_list gradients = torch::autograd::grad(
        outputs, inputs, cotangents, /*retain_graph=*/true, /*create_graph=*/true, /*allow_unused=*/true);
    for (size_t i = 0; i < places.size(); ++i) {
      found[places[i]] = gradients[i];
    }
    return found;
  }
};

// Whether the layers here serve these arguments; else PyTorch's composition does, which has the errors, too.
bool serves(const Tensor& input, const Tensor& hx, const OptionalTensor& cx, const Arguments& with) {
  using c10::DispatchKey;
  if (c10::impl::tls_is_dispatch_key_included(DispatchKey::Python) ||
      c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    return false;
  }
  const int64_t directions = with.bidirectional ? 2 : 1, of_layer = with.has_biases ? 4 : 2;
  std::vector<Tensor> all(with.params.begin(), with.params.end());
  all.insert(all.end(), {input, hx});
  if (cx.has_value()) {
    all.push_back(*cx);
  }
  for (const Tensor& tensor : all) {
    if (!tensor.defined() || tensor.device() != input.device() || tensor.scalar_type() != input.scalar_type() ||
        tensor.layout() != at::kStrided || tensor.key_set().has(DispatchKey::Python) ||
        tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor._fw_grad(/*level=*/0).defined()) {
      return false;
    }
  }
  if (!c10::isFloatingType(input.scalar_type()) || input.dim() != 3 || input.numel() == 0 || hx.dim() != 3 ||
      with.num_layers < 1 ||
      static_cast<int64_t>(with.params.size()) != with.num_layers * directions * of_layer) {
    return false;
  }
  const int64_t hidden = hx.size(2), rows = gates_of(with.mode) * hidden;
  const std::vector<int64_t> states{with.num_layers * directions, input.size(with.batch_first ? 0 : 1), hidden};
  if (hidden == 0 || hx.sizes() != states || (cx.has_value() && cx->sizes() != states)) {
    return false;
  }
  for (size_t i = 0; i < with.params.size(); ++i) {
    const int64_t place = static_cast<int64_t>(i) % of_layer, layer = static_cast<int64_t>(i) / (of_layer * directions);
    const int64_t features = layer == 0 ? input.size(2) : directions * hidden;
    const auto sizes = with.params[i].sizes();
    const bool fits = place == 0 ? sizes == at::IntArrayRef{rows, features}
        : place == 1             ? sizes == at::IntArrayRef{rows, hidden}
                                 : sizes == at::IntArrayRef{rows};
    if (!fits) {
      return false;
    }
  }
  return with.dropout >= 0 && with.dropout <= 1;
}

States layers(const Tensor& given, const Tensor& hx, const OptionalTensor& cx, const Arguments& with) {
  const bool any = at::GradMode::is_enabled() &&
      (given.requires_grad() || hx.requires_grad() || (cx.has_value() && cx->requires_grad()) ||
       std::any_of(with.params.begin(), with.params.end(), [](const Tensor& one) { return one.requires_grad(); }));
  Tensor input = with.batch_first ? given.transpose(0, 1) : given;
  const size_t of_layer = with.has_biases ? 4 : 2;
  std::vector<Tensor> last, cells;
  for (int64_t layer = 0, place = 0; layer < with.num_layers; ++layer) {
    std::vector<Tensor> outs;
    for (int64_t direction = 0; direction < (with.bidirectional ? 2 : 1); ++direction, ++place) {
      const auto params = with.params.slice(place * of_layer, of_layer);
      const auto found = RnnLayer::apply(
          input, hx.select(0, place), cx.has_value() ? OptionalTensor(cx->select(0, place)) : std::nullopt, params[0],
          params[1], with.has_biases ? OptionalTensor(params[2]) : std::nullopt,
          with.has_biases ? OptionalTensor(params[3]) : std::nullopt, with.mode, direction == 1, any);
      outs.push_back(found[0]);
      last.push_back(found[1]);
      cells.push_back(found[2]);
    }
    input = outs.size() == 1 ? outs[0] : at::cat(outs, 2);
    if (with.dropout != 0 && with.train && layer + 1 < with.num_layers) {
      input = at::dropout(input, with.dropout, /*train=*/true);
    }
  }
  return {
      with.batch_first ? input.transpose(0, 1) : input, at::stack(last),
      cx.has_value() ? at::stack(cells) : Tensor()};
}

States run(const Tensor& input, const Tensor& hx, const OptionalTensor& cx, const Arguments& with) {
  const auto type = c10::DeviceType::PrivateUse1;
  if (!at::autocast::is_autocast_enabled(type)) {
    return serves(input, hx, cx, with) ? layers(input, hx, cx, with) : composed(input, hx, cx, with);
  }
  // In the dtype of autocast throughout, as cuDNN's layers are.
  const auto dtype = at::autocast::get_autocast_dtype(type);
  const auto cast = [&](const Tensor& one) { return at::autocast::cached_cast(dtype, one, type); };
  std::vector<Tensor> params;
  for (const Tensor& one : with.params) {
    params.push_back(cast(one));
  }
  Arguments casted = with;
  casted.params = params;
  const Tensor input_cast = cast(input), hx_cast = cast(hx);
  const OptionalTensor cx_cast = cx.has_value() ? OptionalTensor(cast(*cx)) : std::nullopt;
  if (!serves(input_cast, hx_cast, cx_cast, casted)) {
    return composed(input, hx, cx, with);
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return layers(input_cast, hx_cast, cx_cast, casted);
}

States lstm(
    const Tensor& input,
    TensorList hx,
    TensorList params,
    bool has_biases,
    int64_t num_layers,
    double dropout,
    bool train,
    bool bidirectional,
    bool batch_first) {
  if (hx.size() != 2) { // PyTorch has the error
    return at::native::lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
  }
  return run(
      input, hx[0], hx[1],
      {params, kLstm, has_biases, num_layers, dropout, train, bidirectional, batch_first});
}

template <int64_t mode>
std::tuple<Tensor, Tensor> others(
    const Tensor& input,
    const Tensor& hx,
    TensorList params,
    bool has_biases,
    int64_t num_layers,
    double dropout,
    bool train,
    bool bidirectional,
    bool batch_first) {
  auto [out, hy, none] = run(
      input, hx, std::nullopt, {params, mode, has_biases, num_layers, dropout, train, bidirectional, batch_first});
  return {out, hy};
}

TORCH_LIBRARY_FRAGMENT(backplane, m) {
  m.def(
      "rnn_layer(Tensor input, Tensor hx, Tensor? cx, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, int mode, "
      "bool reverse, bool training) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "rnn_layer_backward(Tensor grad, Tensor grad_hy, Tensor grad_cy, Tensor input, Tensor hx, Tensor? cx, Tensor w_ih, "
      "Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor out, Tensor hy, Tensor cy, Tensor saved, int mode, bool reverse) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "host_rnn_layer(Tensor input, Tensor hx, Tensor? cx, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, "
      "int mode, bool reverse, bool training, *, Tensor(a!) out, Tensor(b!) hy, Tensor(c!)? cy, Tensor(d!)? saved) -> ()");
  m.def(
      "host_rnn_layer_backward(Tensor grad, Tensor grad_hy, Tensor grad_cy, Tensor input, Tensor hx, Tensor? cx, "
      "Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor out, Tensor hy, Tensor cy, Tensor saved, int mode, "
      "bool reverse, *, Tensor(a!) of_input, Tensor(b!) of_hx, Tensor(c!)? of_cx, Tensor(d!) of_w_ih, Tensor(e!) of_w_hh, "
      "Tensor(f!)? of_b_ih, Tensor(g!)? of_b_hh) -> ()");
}

TORCH_LIBRARY_IMPL(backplane, CPU, m) {
  m.impl(
      "rnn_layer",
      +[](const Tensor& input, const Tensor& hx, const OptionalTensor& cx, const Tensor& w_ih, const Tensor& w_hh,
          const OptionalTensor& b_ih, const OptionalTensor& b_hh, int64_t mode, bool reverse, bool training) {
        return layer_on_cpu(input, hx, cx, w_ih, w_hh, b_ih, b_hh, mode, reverse, training, std::nullopt);
      });
  m.impl("rnn_layer_backward", &gradients_on_cpu);
  m.impl("host_rnn_layer", &host_layer);
  m.impl("host_rnn_layer_backward", &host_gradients);
}

TORCH_LIBRARY_IMPL(backplane, PrivateUse1, m) {
  m.impl("rnn_layer", &layer_on_bp);
  m.impl("rnn_layer_backward", &gradients_on_bp);
}

void implement(torch::Library& m) {
  m.impl("lstm.input", &lstm);
  m.impl("gru.input", &others<kGru>);
  m.impl("rnn_tanh.input", &others<kTanh>);
  m.impl("rnn_relu.input", &others<kRelu>);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  implement(m);
}

// RnnLayer has the gradients; everything else that they call is differentiable.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  implement(m);
}

} // namespace
} // namespace backplane
