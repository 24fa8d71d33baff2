// Recurrent layers: LSTM, GRU and RNN over sequences that are not packed. PyTorch composes them of products and fused cells, step
// by step, on every device but the CPU. Here each layer is an operator with gradients (rnn_layer.h): the input's gates of all
// steps are one product, a step is one product and one kernel (rnn_steps.cpp), and the gradients of weights are one product
// each; or the host computes the whole layer.
//
// What PyTorch's composition serves besides stays with it: packed sequences, projections, forward and second derivatives,
// transforms and modes of Python's; and it has the errors.
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gru_native.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/rnn_relu_native.h>
#include <ATen/ops/rnn_tanh_native.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "aten/rnn_layer.h"

namespace backplane {
namespace {

using at::Tensor;
using at::TensorList;
using torch::jit::Stack;
using OptionalTensor = std::optional<Tensor>;

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
    Stack stack;
    torch::jit::push(stack, input, hx, cx, w_ih, w_hh, b_ih, b_hh, mode, reverse, training);
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("backplane::rnn_layer", "");
    asks_no_planner(input) ? layer_of_bp(op, &stack) : op.callBoxed(stack);
    const Tensor out = stack[0].toTensor(), hy = stack[1].toTensor(), cy = stack[2].toTensor(), saved = stack[3].toTensor();
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
    const OptionalTensor cx = optional(saved[2]), b_ih = optional(saved[5]), b_hh = optional(saved[6]);
    Stack stack;
    torch::jit::push(stack, grads[0], grads[1], grads[2]);
    torch::jit::push(stack, saved[0], saved[1], cx, saved[3], saved[4], b_ih, b_hh, mode, reverse);
    torch::jit::push(stack, saved[7], saved[8], saved[9], saved[10]);
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("backplane::rnn_layer_backward", "");
    asks_no_planner(saved[0]) ? gradients_of_bp(op, &stack) : op.callBoxed(stack);
    const auto of = [&](size_t i) { return stack[i].toTensor(); };
    return {
        of(0), of(1), cx.has_value() ? of(2) : Tensor(), of(3), of(4), b_ih.has_value() ? of(5) : Tensor(),
        b_hh.has_value() ? of(6) : Tensor(), Tensor(), Tensor(), Tensor()};
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
