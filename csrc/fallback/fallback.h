// Running an operator with PyTorch's CPU kernel.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace backplane {

// The boxed kernel behind every operator that bp has no kernel of its own for.
void cpu_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Registers the boxed kernel where PyTorch would prefer a composite one. To be called once, after all other registrations.
void register_direct_fallbacks();
bool has_direct_fallback(const c10::OperatorHandle& op);

// Runs `kernel`'s CPU kernel on the arguments of `op` (the two take the same), counted as a fallback of `op`.
void run_on_cpu(const c10::OperatorHandle& op, const c10::OperatorHandle& kernel, torch::jit::Stack* stack);

// Throws what the CPU kernel says of such arguments, without their contents: for calls that it is known to refuse. It is no
// fallback, and not counted. Returns if the kernel takes them, or if the CPU has none. What is refused costs no memory,
// whatever its size; what is taken after all may, so nothing is asked of arguments of more than `most_bytes`.
void raise_cpu_error(
    const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, size_t most_bytes = SIZE_MAX);

// What to do when an operator falls back on a device where that means copying: say so once per operator (the default),
// nothing, or raise.
enum class FallbackPolicy { Warn, Silent, Error };
void set_fallback_policy(FallbackPolicy policy);
FallbackPolicy fallback_policy();

// {operator, calls} for each operator that fell back since the last reset.
std::vector<std::pair<std::string, uint64_t>> fallback_counts();
void reset_fallback_counts();

} // namespace backplane
