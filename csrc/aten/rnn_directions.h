// Arguments and results of recurrent layers: of a whole layer, as operators take them, and of one direction, as it is
// computed. Also the computation of a direction by steps, which works on any device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace backplane {

using OptionalTensor = std::optional<at::Tensor>;

enum Mode : int64_t { kRelu, kTanh, kLstm, kGru }; // PyTorch's values

// The columns of the gates, and of what a step saves for gradients, as multiples of the state's columns.
int64_t gates_of(int64_t mode);
int64_t saved_per_unit(int64_t mode);

at::Tensor nothing(const at::Tensor& like);
OptionalTensor if_any(const at::Tensor& tensor);

// The direction's part of a tensor, in the first dimension. An empty tensor or nullopt stays as it is.
at::Tensor part(const at::Tensor& tensor, int64_t direction);
OptionalTensor part(const OptionalTensor& tensor, int64_t direction);

// The arguments of a layer in one direction.
struct Direction {
  at::Tensor input; // (time, batch, features)
  at::Tensor hx; // (batch, hidden)
  OptionalTensor cx; // of an LSTM
  at::Tensor w_ih;
  at::Tensor w_hh;
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

// The arguments of a layer, as all operators here take them: five arguments, in this order.
struct LayerArguments {
  static constexpr size_t kCount = 5;
  explicit LayerArguments(c10::ArrayRef<c10::IValue> arguments);

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
  Direction direction(int64_t i) const;
  // Throws unless the tensor, if any, has these sizes, and the input's dtype and device.
  void check(const OptionalTensor& tensor, at::IntArrayRef sizes) const;

  at::Tensor input; // (time, batch, features)
  at::Tensor hx; // (directions, batch, hidden)
  OptionalTensor cx; // of an LSTM
  std::vector<at::Tensor> params; // for each direction both weights, and both biases if there are any
  int64_t mode;
};

// The results of a layer or of one direction.
struct RnnResults {
  RnnResults direction(int64_t i) const;

  at::Tensor out; // (time, batch, directions * hidden); of a direction (time, batch, hidden)
  at::Tensor hy; // (directions, batch, hidden); of a direction (batch, hidden)
  at::Tensor cy; // likewise, of an LSTM; otherwise empty
  // What gradients need, if anything: from steps (directions, time, batch, kept * hidden), from oneDNN (directions,
  // bytes). Also empty if the layer was given no tensor for it: then the backward computes the layer again.
  at::Tensor saved;
};

// A layer's arguments, results and gradients of the results, as backward operators take them: three arguments before
// `LayerArguments`'s and four after.
struct Computed {
  static constexpr size_t kCount = 3 + LayerArguments::kCount + 4;
  explicit Computed(c10::ArrayRef<c10::IValue> arguments);

  at::Tensor grad, grad_hy, grad_cy;
  LayerArguments given;
  RnnResults results;
};

// The same for one direction.
struct ComputedDirection {
  at::Tensor grad, grad_hy, grad_cy;
  Direction given;
  RnnResults results;
};

// Allocates results. `training`: including what steps save.
RnnResults new_results(const LayerArguments& given, bool training);

// Whether the layer needs saved values for gradients, but has none.
bool saves_nothing(const Computed& computed);

// The gradients of one direction: of input, hx, cx, both weights and both biases. Empty for arguments that do not
// exist.
struct Gradients {
  at::Tensor input, hx, cx, w_ih, w_hh, b_ih, b_hh;
};

// Combines the gradients of the directions to those of a layer: of input, hx, cx (or an empty tensor) and the
// parameters.
std::vector<at::Tensor> gradients(
    const Computed& computed, const std::function<Gradients(const ComputedDirection&)>& of_direction);

// Computes a direction by steps. With `training`, fills results.saved: an LSTM's gates and cell, or what a GRU's step
// saves.
void layer_by_steps(const Direction& given, const RnnResults& results, bool training);

// `saved`: as layer_by_steps fills it.
Gradients gradients_by_steps(const ComputedDirection& computed, const at::Tensor& saved);

} // namespace backplane
