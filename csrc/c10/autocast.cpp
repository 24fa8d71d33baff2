// Autocast for bp: torch.autocast("bp") casts like torch.autocast("cuda"), from ATen's own lists of operators.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "compat.h"

namespace {

// ATen's lists below use these names unqualified.
using namespace backplane::compat;
using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;

// Operators that are in no list run with the dtypes of their arguments.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// The gradient of a probability near 0 or 1 overflows in half precision; torch.cuda rejects it, too.
Tensor refuse_binary_cross_entropy(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(
      false,
      "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: drop the sigmoid before "
      "them "
      "and use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, which are safe");
}

#define BP_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define BP_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define BP_FLOAT32_BY_DTYPE_ARGUMENT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define BP_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(BP_LOWER_PRECISION)
  AT_FORALL_FP32(BP_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(BP_FLOAT32_BY_DTYPE_ARGUMENT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(BP_WIDEST)
  m.impl("binary_cross_entropy", TORCH_FN(refuse_binary_cross_entropy));
}

} // namespace
