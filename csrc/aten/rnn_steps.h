// Calls of the step operators of recurrent layers, for CPU and bp tensors. rnn_steps.cpp has their schemas and
// describes the layout of gates and saved values.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace backplane {

class Step {
 public:
  explicit constexpr Step(const char* name) : name_(name) {}

  template <class... Arguments>
  void operator()(const Arguments&... arguments) const {
    torch::jit::Stack stack;
    torch::jit::push(stack, arguments...);
    c10::Dispatcher::singleton().findSchemaOrThrow(name_, "").callBoxed(stack);
  }

 private:
  const char* name_;
};

inline constexpr Step lstm_step("backplane::lstm_step");
inline constexpr Step lstm_step_backward("backplane::lstm_step_backward");
inline constexpr Step gru_step("backplane::gru_step");
inline constexpr Step gru_step_backward("backplane::gru_step_backward");
inline constexpr Step rnn_step("backplane::rnn_step");
inline constexpr Step rnn_step_backward("backplane::rnn_step_backward");

} // namespace backplane
