// Operators on host devices that are done later: in stream order by the stream's own thread, or at each replay of a graph.
//
// What an operator's results look like is asked of PyTorch's meta kernel. They get their memory at once, and the CPU's kernel
// fills it when its time comes, on stand-ins of the arguments that own nothing. Operators whose results depend on values, or
// are none of bp's tensors, have to be done at once.
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
// Whether operators on the device's current stream are to be done later: it is being captured, or host devices work
// asynchronously (host_device.h).
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

// Gives the call to the current stream of the device, and puts the results in the place of the arguments on the stack. False,
// and nothing is changed: it has to be done at once, and refused then if it is wrong; in a capture, where it cannot be done, this
// throws what the CPU's kernel refuses. What is refused for values is thrown by the stream's next synchronization.
bool defer(const DeferredOperator& call, c10::DeviceIndex index, torch::jit::Stack* stack);

} // namespace backplane
