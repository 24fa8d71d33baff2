// CPU kernels for dtypes that CUDA kernels support and CPU kernels do not: runs them in a wider dtype. Also works
// around layouts that CPU kernels do not support.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>

namespace backplane {

// The dtypes that one operator's CPU kernel lacks.
struct PromotionRule;

// nullptr for most operators, whose CPU kernels support the same dtypes as CUDA's.
const PromotionRule* promotion_rule(const c10::OperatorHandle& op);

// Runs the CPU kernel of `op` on the CPU tensors of the stack. If the kernel lacks their dtype according to the rule,
// computes in a wider dtype and rounds the results to the dtype that PyTorch specifies.
void run_promoted(const PromotionRule& rule, const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace backplane
