// Calls of the step operators of recurrent layers, for CPU and bp tensors. rnn_steps.cpp has their schemas and
// describes the layout of gates and saved values.
#pragma once

#include <ATen/core/stack.h>

#include "c10/operators.h"

namespace backplane {

class RnnStep {
 public:
  explicit constexpr RnnStep(const char* name) : name_(name) {}

  template <class... Arguments>
  void operator()(const Arguments&... arguments) const {
    torch::jit::Stack stack;
    torch::jit::push(stack, arguments...);
    find_operator(name_).callBoxed(stack);
  }

 private:
  const char* name_;
};

inline constexpr RnnStep lstm_step("backplane::lstm_step");
inline constexpr RnnStep lstm_step_backward("backplane::lstm_step_backward");
inline constexpr RnnStep gru_step("backplane::gru_step");
inline constexpr RnnStep gru_step_backward("backplane::gru_step_backward");
inline constexpr RnnStep rnn_step("backplane::rnn_step");
inline constexpr RnnStep rnn_step_backward("backplane::rnn_step_backward");

} // namespace backplane
