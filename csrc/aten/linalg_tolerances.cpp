// torch.linalg.pinv and matrix_rank on devices without float64. PyTorch creates their tolerances as float64 tensors on
// every device but MPS. Here they have the dtype of the singular values that they are compared with.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_matrix_rank.h>
#include <ATen/ops/linalg_matrix_rank_native.h>
#include <ATen/ops/linalg_pinv.h>
#include <ATen/ops/linalg_pinv_native.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "devices/device.h"

namespace backplane {
namespace {

using at::Tensor;
using Number = std::optional<double>;
using OptionalTensor = std::optional<Tensor>;

// Otherwise PyTorch's implementation works, or raises the error for inputs that are not matrices.
bool needs_own_dtype(const Tensor& self) {
  return self.dim() >= 2 && !device(self.device().index()).properties().supports(c10::kDouble);
}

double epsilon(c10::ScalarType dtype) {
  return dtype == c10::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
}

// Returns the absolute and the relative tolerance by PyTorch's rule: the default rtol is the dtype's epsilon times the
// larger size, or 0 where atol is above 0.
std::pair<Tensor, Tensor> tolerances(const Tensor& self, const OptionalTensor& atol, const OptionalTensor& rtol) {
  const auto real = c10::toRealValueType(self.scalar_type());
  const auto options = self.options().dtype(real);
  const Tensor absolute = atol.has_value() ? *atol : at::zeros({}, options);
  if (rtol.has_value()) {
    return {absolute, *rtol};
  }
  const auto larger = static_cast<double>(std::max(self.size(-1), self.size(-2)));
  const Tensor relative = at::full({}, epsilon(real) * larger, options);
  return {absolute, atol.has_value() ? at::where(absolute.gt(0), at::zeros({}, options), relative) : relative};
}

std::pair<Tensor, Tensor> tolerances(const Tensor& self, Number atol, Number rtol) {
  const auto options = self.options().dtype(c10::toRealValueType(self.scalar_type()));
  const auto made = [&](Number one) {
    return one.has_value() ? OptionalTensor(at::full({}, *one, options)) : std::nullopt;
  };
  return tolerances(self, made(atol), made(rtol));
}

Tensor pinv(const Tensor& self, Number atol, Number rtol, bool hermitian) {
  if (!needs_own_dtype(self)) {
    return at::native::linalg_pinv(self, atol, rtol, hermitian);
  }
  const auto [absolute, relative] = tolerances(self, atol, rtol);
  return at::linalg_pinv(self, absolute, relative, hermitian);
}

Tensor pinv_by_tensors(const Tensor& self, const OptionalTensor& atol, const OptionalTensor& rtol, bool hermitian) {
  if (!needs_own_dtype(self) || (atol.has_value() && rtol.has_value())) {
    return at::native::linalg_pinv(self, atol, rtol, hermitian);
  }
  const auto [absolute, relative] = tolerances(self, atol, rtol);
  return at::native::linalg_pinv(self, OptionalTensor(absolute), OptionalTensor(relative), hermitian);
}

Tensor matrix_rank(const Tensor& self, Number atol, Number rtol, bool hermitian) {
  if (!needs_own_dtype(self)) {
    return at::native::linalg_matrix_rank(self, atol, rtol, hermitian);
  }
  const auto [absolute, relative] = tolerances(self, atol, rtol);
  return at::linalg_matrix_rank(self, absolute, relative, hermitian);
}

Tensor matrix_rank_by_tensors(
    const Tensor& self, const OptionalTensor& atol, const OptionalTensor& rtol, bool hermitian) {
  if (!needs_own_dtype(self) || (atol.has_value() && rtol.has_value())) {
    return at::native::linalg_matrix_rank(self, atol, rtol, hermitian);
  }
  const auto [absolute, relative] = tolerances(self, atol, rtol);
  return at::native::linalg_matrix_rank(self, OptionalTensor(absolute), OptionalTensor(relative), hermitian);
}

Tensor pinv_by_rcond(const Tensor& self, const Tensor& rcond, bool hermitian) {
  if (!needs_own_dtype(self)) {
    return at::native::linalg_pinv(self, rcond, hermitian);
  }
  return at::linalg_pinv(self, at::zeros({}, rcond.options()), rcond, hermitian);
}

Tensor matrix_rank_by_number(const Tensor& self, double tol, bool hermitian) {
  return needs_own_dtype(self) ? at::linalg_matrix_rank(self, Number(tol), Number(0), hermitian)
                               : at::native::linalg_matrix_rank(self, tol, hermitian);
}

Tensor matrix_rank_by_tol(const Tensor& self, const Tensor& tol, bool hermitian) {
  if (!needs_own_dtype(self)) {
    return at::native::linalg_matrix_rank(self, tol, hermitian);
  }
  return at::linalg_matrix_rank(self, tol, at::zeros({}, tol.options()), hermitian);
}

void declare(torch::Library& m) {
  m.impl("linalg_pinv.atol_rtol_float", &pinv);
  m.impl("linalg_pinv.rcond_tensor", &pinv_by_rcond);
  m.impl("linalg_matrix_rank", &matrix_rank_by_number);
  m.impl("linalg_matrix_rank.tol_tensor", &matrix_rank_by_tol);
  m.impl("linalg_matrix_rank.atol_rtol_float", &matrix_rank);
  m.impl("linalg_matrix_rank.atol_rtol_tensor", &matrix_rank_by_tensors);
}

// Composite functions: registered for autograd, and for calls without it (inference mode).
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  declare(m);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  declare(m);
  m.impl("linalg_pinv.atol_rtol_tensor", &pinv_by_tensors); // autograd has a formula for it
}

} // namespace
} // namespace backplane
