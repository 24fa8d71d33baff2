// Operators on host devices that run later: in stream order in the stream's own thread, or at each replay of a graph.
//
// PyTorch's meta kernel describes the results. They get their memory at once, and the CPU kernel fills it later, on
// stand-ins of the arguments that own nothing. Operators whose results depend on values, or are no bp tensors, run at once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <string>

#include "fallback/dtype_promotion.h"

namespace backplane {

// Whether the device's streams can be given operators: it runs no kernels, and the host computes on its memory.
bool can_defer(c10::DeviceIndex index);
// Whether operators on the device's current stream run later: it is being captured, or the device defers operators.
bool defers(c10::DeviceIndex index);

struct DeferredOperator {
  const c10::OperatorHandle& op;
  const c10::OperatorHandle& kernel; // whose CPU kernel is run; takes the same arguments
  const std::string& name;
  c10::ArrayRef<bool> written; // per argument
  int generator; // index of the Generator argument; -1: none
  const PromotionRule* promotion; // nullptr: none
  const c10::KernelFunction* structured_meta; // nullptr: none
};

enum class Deferral : uint8_t {
  Submitted, // the results are in the place of the arguments on the stack
  Impossible, // nothing has changed: the call has to run at once
  Refused // the same, and the meta kernel refuses the call, or does not know its results
};

// Submits the call to the current stream of the device. What the CPU kernel refuses for values is thrown by the stream's next
// synchronization.
Deferral defer(const DeferredOperator& call, c10::DeviceIndex index, torch::jit::Stack* stack);

} // namespace backplane
