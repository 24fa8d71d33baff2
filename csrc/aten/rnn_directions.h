// What a recurrent layer is made of and comes to: of a whole layer, as operators take it, and of one direction, as it is computed;
// and a direction by steps, which any device computes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace backplane {

using OptionalTensor = std::optional<at::Tensor>;

enum Mode : int64_t { kRelu, kTanh, kLstm, kGru }; // PyTorch's numbers

// How many times a state's columns gates have, and what a step saves for gradients.
int64_t gates_of(int64_t mode);
int64_t kept_of(int64_t mode);

at::Tensor nothing(const at::Tensor& like);
OptionalTensor if_any(const at::Tensor& tensor);

// The part of a direction, in the first dimension; of nothing, nothing.
at::Tensor part(const at::Tensor& tensor, int64_t direction);
OptionalTensor part(const OptionalTensor& tensor, int64_t direction);

// A layer in one direction.
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

// What a layer is computed of, as all operators here take it: five arguments, in this order.
struct Given {
  static constexpr size_t kCount = 5;
  explicit Given(c10::ArrayRef<c10::IValue> arguments);

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
  // Refuses another tensor than one of these sizes.
  void check(const OptionalTensor& tensor, at::IntArrayRef sizes) const;

  at::Tensor input; // (time, batch, features)
  at::Tensor hx; // (directions, batch, hidden)
  OptionalTensor cx; // of an LSTM
  std::vector<at::Tensor> params; // of each direction both weights, and both biases where there are any
  int64_t mode;
};

// What a layer comes to, or a direction's part of that.
struct RnnResults {
  RnnResults direction(int64_t i) const;

  at::Tensor out; // (time, batch, directions * hidden); of a direction (time, batch, hidden)
  at::Tensor hy; // (directions, batch, hidden); of a direction (batch, hidden)
  at::Tensor cy; // the same, of an LSTM; else nothing
  // What gradients need, if anything: of steps (directions, time, batch, kept * hidden), of oneDNN (directions, bytes). Nothing
  // too where it had no place to go to: then the layer is computed again.
  at::Tensor saved;
};

// What a layer came to, and the gradients of that, as backward operators take both: three arguments before `Given`'s, four behind.
struct Computed {
  static constexpr size_t kCount = 3 + Given::kCount + 4;
  explicit Computed(c10::ArrayRef<c10::IValue> arguments);

  at::Tensor grad, grad_hy, grad_cy;
  Given given;
  RnnResults results;
};

// The same of a direction.
struct ComputedDirection {
  at::Tensor grad, grad_hy, grad_cy;
  Direction given;
  RnnResults results;
};

// RnnResults that are to be filled. `training`: also with what steps save.
RnnResults new_results(const Given& given, bool training);

// Whether a layer that saves something for gradients has not.
bool saves_nothing(const Computed& computed);

// Of a direction: of input, hx, cx, both weights and both biases. What there is none of has nothing.
struct Gradients {
  at::Tensor input, hx, cx, w_ih, w_hh, b_ih, b_hh;
};

// Of a layer, by those of its directions: of input, hx, cx (or of nothing) and the parameters.
std::vector<at::Tensor> gradients(
    const Computed& computed, const std::function<Gradients(const ComputedDirection&)>& of_direction);

// Fills the results. An LSTM saves its gates and its cell, a GRU what a step saves; `saved` is of steps.
void layer_by_steps(const Direction& given, const RnnResults& results, bool training);

// `saved` is of steps.
Gradients gradients_by_steps(const ComputedDirection& computed, const at::Tensor& saved);

} // namespace backplane
