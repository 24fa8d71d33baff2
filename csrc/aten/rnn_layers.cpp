// Recurrent layers: LSTM, GRU and RNN over sequences that are not packed. On every device but the CPU, PyTorch composes
// them of matrix products and fused cells, step by step. Here each layer is one operator with gradients (rnn_layer.h):
// one matrix product computes the input's gates of all steps, each step is one product and one kernel (rnn_steps.cpp),
// and the gradient of each weight is one product. Or the host computes the whole layer.
//
// PyTorch's composite form handles everything else: packed sequences, projections, forward-mode and second derivatives,
// function transforms and Python modes. It also raises the errors.
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gru_native.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/rnn_relu_native.h>
#include <ATen/ops/rnn_tanh_native.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "aten/rnn_directions.h"
#include "aten/rnn_layer.h"
#include "c10/operators.h"

namespace backplane {
namespace {

using at::Tensor;
using at::TensorList;
using torch::jit::Stack;
using OptionalTensor = std::optional<Tensor>;

struct Arguments {
  TensorList params; // for each layer and direction the weights of input and state, and both biases if there are any
  int64_t mode;
  bool has_biases;
  int64_t num_layers;
  double dropout;
  bool train;
  bool bidirectional;
  bool batch_first;
};

using States = std::tuple<Tensor, Tensor, Tensor>; // all states, the last state, and the last cell of an LSTM

// PyTorch's composite form of the layers, for any device.
States composed(const Tensor& input, const Tensor& hx, const OptionalTensor& cx, const Arguments& with) {
  const auto run = [&](const auto& function) -> States {
    auto [out, hy] = function(
        input, hx, with.params, with.has_biases, with.num_layers, with.dropout, with.train, with.bidirectional,
        with.batch_first);
    return {out, hy, Tensor()};
  };
  using Function =
      std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, TensorList, bool, int64_t, double, bool, bool, bool);
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

// One layer, in as many directions as hx has states.
class RnnLayer final : public torch::autograd::Function<RnnLayer> {
 public:
  static variable_list forward(
      AutogradContext* ctx,
      const Tensor& input,
      const Tensor& hx,
      const OptionalTensor& cx,
      TensorList params,
      int64_t mode,
      bool training) {
    const at::AutoDispatchBelowADInplaceOrView below;
    Stack stack;
    torch::jit::push(stack, input, hx, cx, params.vec(), mode, training);
    static const auto op = find_operator("backplane::rnn_layer");
    bypasses_planner(input) ? layer_of_bp(op, &stack) : op.callBoxed(stack);
    const Tensor out = stack[0].toTensor(), hy = stack[1].toTensor(), cy = stack[2].toTensor(),
                 saved = stack[3].toTensor();
    variable_list kept{out, hy, cy, saved, input, hx, cx.value_or(Tensor())};
    kept.insert(kept.end(), params.begin(), params.end());
    ctx->save_for_backward(kept);
    ctx->saved_data["mode"] = mode;
    return {out, hy, cy};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const variable_list given(saved.begin() + 4, saved.end()); // input, hx, cx, and the parameters
    const int64_t mode = ctx->saved_data["mode"].toInt();
    variable_list found;
    if (at::GradMode::is_enabled()) {
      found = differentiable(given, grads, mode);
    } else {
      const at::AutoDispatchBelowADInplaceOrView below;
      const OptionalTensor cx = given[2].defined() ? OptionalTensor(given[2]) : std::nullopt;
      Stack stack;
      torch::jit::push(stack, grads[0], grads[1], grads[2]);
      torch::jit::push(stack, given[0], given[1], cx, std::vector<Tensor>(given.begin() + 3, given.end()), mode);
      torch::jit::push(stack, saved[0], saved[1], saved[2], saved[3]);
      static const auto op = find_operator("backplane::rnn_layer_backward");
      bypasses_planner(given[0]) ? gradients_of_bp(op, &stack) : op.callBoxed(stack);
      found = stack[0].toTensorVector();
      if (!cx.has_value()) {
        found[2] = Tensor();
      }
    }
    found.resize(given.size() + 2); // no gradients for mode and training
    return found;
  }

 private:
  // Differentiable gradients, through PyTorch's composite form.
  static variable_list differentiable(variable_list given, const variable_list& grads, int64_t mode) {
    variable_list found(given.size()), inputs;
    std::vector<size_t> places;
    for (size_t i = 0; i < given.size(); ++i) {
      if (given[i].defined()) {
        given[i] = given[i].view_as(given[i]); // so that no gradient flows from one argument through another
      }
      if (given[i].defined() && given[i].requires_grad()) {
        inputs.push_back(given[i]);
        places.push_back(i);
      }
    }
    const variable_list params(given.begin() + 3, given.end());
    const int64_t directions = given[1].size(0);
    const OptionalTensor cx = given[2].defined() ? OptionalTensor(given[2]) : std::nullopt;
    const auto [out, hy, cy] = composed(
        given[0], given[1], cx,
        {params, mode, /*has_biases=*/static_cast<int64_t>(params.size()) == 4 * directions, /*num_layers=*/1,
         /*dropout=*/0,
         /*train=*/true, /*bidirectional=*/directions == 2, /*batch_first=*/false});
    variable_list outputs{out, hy}, cotangents{grads[0], grads[1]};
    if (cx.has_value()) {
      outputs.push_back(cy);
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

// Whether the layers here support the arguments. Otherwise PyTorch's composite form runs, or raises the error.
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
      with.num_layers < 1 || static_cast<int64_t>(with.params.size()) != with.num_layers * directions * of_layer) {
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
  const int64_t directions = with.bidirectional ? 2 : 1;
  const size_t of_layer = directions * (with.has_biases ? 4 : 2);
  std::vector<Tensor> last, cells;
  for (int64_t layer = 0; layer < with.num_layers; ++layer) {
    const auto states = [&](const Tensor& all) { return all.narrow(0, layer * directions, directions); };
    const auto found = RnnLayer::apply(
        input, states(hx), cx.has_value() ? OptionalTensor(states(*cx)) : std::nullopt,
        with.params.slice(layer * of_layer, of_layer), with.mode, any);
    input = found[0];
    last.push_back(found[1]);
    cells.push_back(found[2]);
    if (with.dropout != 0 && with.train && layer + 1 < with.num_layers) {
      input = at::dropout(input, with.dropout, /*train=*/true);
    }
  }
  const auto joined = [](const std::vector<Tensor>& states) {
    return states.size() == 1 ? states[0] : at::cat(states);
  };
  return {with.batch_first ? input.transpose(0, 1) : input, joined(last), cx.has_value() ? joined(cells) : Tensor()};
}

States run(const Tensor& input, const Tensor& hx, const OptionalTensor& cx, const Arguments& with) {
  const auto type = c10::DeviceType::PrivateUse1;
  if (!at::autocast::is_autocast_enabled(type)) {
    return serves(input, hx, cx, with) ? layers(input, hx, cx, with) : composed(input, hx, cx, with);
  }
  // Computes everything in autocast's dtype, like cuDNN's layers.
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
  if (hx.size() != 2) { // PyTorch raises the error
    return at::native::lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
  }
  return run(input, hx[0], hx[1], {params, kLstm, has_biases, num_layers, dropout, train, bidirectional, batch_first});
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
  auto [out, hy, none] =
      run(input, hx, std::nullopt, {params, mode, has_biases, num_layers, dropout, train, bidirectional, batch_first});
  return {out, hy};
}

void register_layers(torch::Library& m) {
  m.impl("lstm.input", &lstm);
  m.impl("gru.input", &others<kGru>);
  m.impl("rnn_tanh.input", &others<kTanh>);
  m.impl("rnn_relu.input", &others<kRelu>);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  register_layers(m);
}

// Needs no autograd formula: RnnLayer has gradients, and all other functions are differentiable.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  register_layers(m);
}

} // namespace
} // namespace backplane
