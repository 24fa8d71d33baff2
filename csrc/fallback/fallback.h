// The fallback: running an operator with PyTorch's CPU kernel.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace backplane {

// The boxed kernel of every operator that has no bp kernel.
void cpu_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Registers the fallback for operators whose composite kernel PyTorch would prefer. Call once, after all other
// registrations.
void register_direct_fallbacks();
bool has_direct_fallback(const c10::OperatorHandle& op);

// Whether the operator's argument `indices` can be on the CPU when the other tensors are not, as with CUDA tensors.
bool is_advanced_indexing(const c10::FunctionSchema& schema);

// Runs the CPU kernel of `kernel` on the arguments of `op`. Both must take the same arguments. Counted as a fallback of
// `op`.
void run_on_cpu(const c10::OperatorHandle& op, const c10::OperatorHandle& kernel, torch::jit::Stack* stack);

// Throws the error that the CPU kernel raises for invalid arguments, by running it on zeros of the same sizes, strides
// and dtypes. Not counted as a fallback. Returns if the kernel accepts the arguments, or if there is no CPU kernel. A
// kernel that rejects its arguments touches no memory, whatever their size. One that accepts them does, so arguments of
// more than `max_bytes` are not tried.
void raise_cpu_error(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, size_t max_bytes = SIZE_MAX);

// What to do when an operator falls back on a device where that requires copies: warn once per operator (the default),
// nothing, or raise an error.
enum class FallbackPolicy { Warn, Silent, Error };
void set_fallback_policy(FallbackPolicy policy);
FallbackPolicy fallback_policy();

// {operator, calls} for each operator that fell back since the last reset.
std::vector<std::pair<std::string, uint64_t>> fallback_counts();
void reset_fallback_counts();

} // namespace backplane
