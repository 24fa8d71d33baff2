// Deferred operators on host devices: the CPU kernel runs in stream order in the stream's thread, or at each replay of
// a graph.
//
// PyTorch's meta kernel gives the sizes, strides and dtypes of the results. They are allocated immediately, and the CPU
// kernel fills them later, on stand-ins of the arguments that do not own memory. Operators whose results depend on
// values, or are not bp tensors, run immediately.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <string>

#include "fallback/dtype_promotion.h"

namespace backplane {

// Whether operators can be deferred on the device: it runs no kernels, and the host can access its memory.
bool can_defer(c10::DeviceIndex index);
// Whether to defer operators on the device's current stream: it is being captured, or the device defers all operators.
bool defers(c10::DeviceIndex index);

struct DeferredOperator {
  const c10::OperatorHandle& op;
  const c10::OperatorHandle& kernel; // the operator whose CPU kernel runs; takes the same arguments
  const std::string& name;
  c10::ArrayRef<bool> written; // per argument
  int generator; // index of the Generator argument; -1: none
  const PromotionRule* promotion; // nullptr: none
  const c10::KernelFunction* structured_meta; // nullptr: none
};

enum class Deferral : uint8_t {
  Submitted, // the results have replaced the arguments on the stack
  Impossible, // nothing has changed: the call has to run immediately
  Refused // likewise, because there is no meta kernel or it rejects the call
};

// Submits the call to the device's current stream. If the CPU kernel throws when it runs, the stream's next
// synchronization throws its error.
Deferral defer(const DeferredOperator& call, c10::DeviceIndex index, torch::jit::Stack* stack);

} // namespace backplane
