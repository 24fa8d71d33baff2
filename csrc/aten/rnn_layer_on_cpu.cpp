#include "aten/rnn_layer_on_cpu.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/mkldnn_rnn_layer_backward.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <functional>

#include "aten/places.h"
#include "devices/openmp.h"

namespace backplane {

using at::Tensor;

namespace {

bool is_onednn(const Tensor& input, int64_t mode) {
  return mode == kLstm && input.scalar_type() == at::kFloat && at::globalContext().userEnabledMkldnn() &&
      at::Context::hasMKLDNN();
}

// Shares: some of the batch's sequences each

constexpr int64_t kLeastSequences = 2; // of a share: weights are read by each, and have gradients in each
constexpr int64_t kMostShares = 255;
constexpr int64_t kFewMultiplications = 1 << 20; // of a step

// Whether each thread computes shares of its own, rather than all threads each step. Measured with two threads
// (docs/measurements.md): of few multiplications that mostly takes 0.4 to 1.0 of the time, by steps of any number 0.7 to 1.0;
// oneDNN's layers of more are 1.4 times as quick to 2.7 times as slow. Nor where more than half of the threads would have
// nothing to do.
bool apart(const Given& given, int64_t shares) {
  const int64_t threads = at::get_num_threads(), parts = given.directions() * shares;
  if (threads <= given.directions()) {
    return true;
  }
  const int64_t multiplications = given.batch() * given.params[0].size(0) * (given.input.size(2) + given.hidden());
  const bool pays = multiplications <= kFewMultiplications || (shares > 1 && !is_onednn(given.input, given.mode));
  return pays && threads <= 2 * parts;
}

int64_t shares_of(const Given& given) {
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const int64_t shares =
      std::max<int64_t>(1, std::min({threads / given.directions(), given.batch() / kLeastSequences, kMostShares}));
  return apart(given, shares) ? shares : 1;
}

Sequences share(int64_t batch, int64_t shares, int64_t i) {
  const int64_t first = batch * i / shares;
  return {first, batch * (i + 1) / shares - first};
}

void in_each_share(const Given& given, int64_t shares, const std::function<void(int64_t, int64_t)>& function) {
  const int64_t count = given.directions() * shares;
  const auto below_modes = [&](int64_t i) {
    const at::AutoDispatchBelowADInplaceOrView below; // other threads have modes of their own
    function(i / shares, i % shares);
  };
  if (apart(given, shares)) {
    run_side_by_side(count, below_modes);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    below_modes(i);
  }
}

// What is saved for gradients

// An LSTM of float32 saves bytes: of each share a header, then oneDNN's workspace or what steps save. Plans set memory aside before
// anybody knows how much oneDNN wants (operators/rnn.py has a bound); where that is too little, steps compute.
enum SavedBy : uint8_t { kSteps, kOnednn };
struct Header {
  SavedBy by;
  uint8_t shares; // that the direction was computed in
};

Header& header_of(const Tensor& saved) {
  return *reinterpret_cast<Header*>(saved.data_ptr<uint8_t>());
}

Tensor behind_header(const Tensor& saved) {
  return saved.narrow(0, kHeader, saved.numel() - kHeader);
}

// How many bytes are set aside for a sequence, and for a share beside: operators/rnn.py has the same, and how it was found.
int64_t bytes_of_sequence(const Given& given) {
  const auto row = [](int64_t size) { return (size + 15) / 16 * 16 + 16; };
  const int64_t hidden = given.hidden();
  return 4 * (given.time() + 1) * (8 * row(hidden) + 7 * row(std::max(given.input.size(2), hidden)));
}
constexpr int64_t kBytesOfShare = 65536 + kHeader;

bool is_bytes(const Tensor& saved) {
  return saved.scalar_type() == at::kByte;
}

// For how many shares there is room.
int64_t most_shares(const Tensor& saved, const Given& given) {
  return is_bytes(saved)
      ? std::max<int64_t>(1, (saved.size(1) - given.batch() * bytes_of_sequence(given)) / kBytesOfShare)
      : kMostShares;
}

// A share's part of what a direction saves.
Tensor saved_of(const Tensor& saved, const Given& given, int64_t shares, int64_t i) {
  if (shares == 1 || saved.numel() == 0) {
    return saved;
  }
  const auto [first, count] = share(given.batch(), shares, i);
  const int64_t bytes = bytes_of_sequence(given);
  return is_bytes(saved) ? saved.narrow(0, first * bytes + i * kBytesOfShare, count * bytes + kBytesOfShare)
                         : saved.narrow(1, first, count);
}

// As numbers, what steps save.
Tensor saved_of_steps(const Tensor& saved, const Direction& given) {
  if (!is_bytes(saved)) {
    return saved;
  }
  const int64_t columns = kept_of(given.mode) * given.hidden();
  return behind_header(saved)
      .narrow(0, 0, given.time() * given.batch() * columns * given.input.element_size())
      .view(given.input.scalar_type())
      .view({given.time(), given.batch(), columns});
}

// A direction of a share

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

void direction_on_cpu(const Direction& given, const Results& results, bool training) {
  const bool in_bytes = training && is_bytes(results.saved);
  if (is_onednn(given.input, given.mode) && (in_bytes || !training)) {
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
      header_of(results.saved).by = kOnednn;
      places.back() = places.back()->narrow(0, 0, bytes);
    }
    if (!in_bytes || places.back()->numel() == bytes) {
      deliver(places, {found.out, found.hy, found.cy, found.saved});
      return;
    }
  }
  if (in_bytes) {
    header_of(results.saved).by = kSteps;
  }
  layer_by_steps(given, {results.out, results.hy, results.cy, saved_of_steps(results.saved, given)}, training);
}

Gradients gradients_on_cpu(const ComputedDirection& computed) {
  const Tensor& saved = computed.results.saved;
  return is_bytes(saved) && header_of(saved).by == kOnednn
      ? gradients_by_onednn(computed, behind_header(saved))
      : gradients_by_steps(computed, saved_of_steps(saved, computed.given));
}

} // namespace

int64_t most_bytes(const Given& given) {
  return given.batch() * bytes_of_sequence(given) + at::get_num_threads() * kBytesOfShare;
}

void layer_on_cpu(const Given& given, const Results& results, bool training) {
  const int64_t shares = std::min(shares_of(given), most_shares(results.saved, given));
  in_each_share(given, shares, [&](int64_t direction, int64_t i) {
    const Sequences some = share(given.batch(), shares, i);
    Results found = results.direction(direction).of(some);
    found.saved = saved_of(found.saved, given, shares, i);
    direction_on_cpu(given.direction(direction).of(some), found, training);
    if (training && is_bytes(found.saved)) {
      header_of(found.saved).shares = static_cast<uint8_t>(shares);
    }
  });
}

void gradients_on_cpu(const Computed& computed, const std::vector<Tensor>& gradients) {
  const Given& given = computed.given;
  const Tensor& saved = computed.results.saved;
  const int64_t shares = is_bytes(saved) ? header_of(saved).shares : shares_of(given);
  TORCH_CHECK(shares >= 1 && shares <= most_shares(saved, given), "a layer cannot have saved ", shares, " shares");
  const auto of_input = [&](Sequences some) { return gradients[0].narrow(1, some.first, some.count); };
  const auto of_param = [&](int64_t direction, size_t j) { return gradients[3 + direction * given.params_of_one() + j]; };
  // Parts come to the second direction's gradients of input, and to those of parameters of shares but the first, before they
  // are added to what the others have in their places.
  std::vector<Gradients> all(given.directions() * shares);
  in_each_share(given, shares, [&](int64_t direction, int64_t i) {
    const Sequences some = share(given.batch(), shares, i);
    const auto rows = [&](const Tensor& states) { return part(states, direction).narrow(0, some.first, some.count); };
    Places places(7);
    if (direction == 0) {
      places[0] = of_input(some);
    }
    places[1] = rows(gradients[1]);
    if (given.cx.has_value()) {
      places[2] = rows(gradients[2]);
    }
    for (size_t j = 0; j < given.params_of_one() && i == 0; ++j) {
      places[3 + j] = of_param(direction, j);
    }
    Gradients& found = all[direction * shares + i];
    {
      const Offer offer(places);
      ComputedDirection one = direction_of(computed, direction).of(some);
      one.results.saved = saved_of(one.results.saved, given, shares, i);
      found = gradients_on_cpu(one);
    }
    deliver(places, {found.input, found.hx, found.cx, found.w_ih, found.w_hh, found.b_ih, found.b_hh});
  });
  for (int64_t direction = 0; direction < given.directions(); ++direction) {
    for (int64_t i = 0; i < shares; ++i) {
      const Gradients& one = all[direction * shares + i];
      if (direction > 0) {
        of_input(share(given.batch(), shares, i)).add_(one.input);
      }
      const Tensor* const params[] = {&one.w_ih, &one.w_hh, &one.b_ih, &one.b_hh};
      for (size_t j = 0; j < given.params_of_one() && i > 0; ++j) {
        of_param(direction, j).add_(*params[j]);
      }
    }
  }
}

} // namespace backplane
