// Dtypes that CUDA's kernels take and the CPU's do not: the CPU's kernel runs in a wider one. Likewise layouts.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>

namespace backplane {

// What is known of one operator: the dtypes that its CPU kernel lacks.
struct PromotionRule;

// nullptr for most operators, whose CPU kernels take what CUDA's do.
const PromotionRule* promotion_rule(const c10::OperatorHandle& op);

// Runs the CPU kernel of `op` on the CPU tensors of the stack: in a wider dtype where the rule says that theirs is
// lacking, and then rounds to the dtype that PyTorch gives the results; else as it is.
void run_promoted(const PromotionRule& rule, const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace backplane
