// The Kaiser window. PyTorch's implementation calls a kernel that only PyTorch's own devices have.
#include <ATen/NumericUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/kaiser_window.h>
#include <ATen/ops/kaiser_window_native.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/special_i0.h>
#include <torch/library.h>

namespace backplane {
namespace {

// I0(beta * sqrt(1 - x^2)) / I0(beta) for x from -1 to 1. Computed in float32 or float64.
at::Tensor kaiser_window(
    int64_t length,
    bool periodic,
    double beta,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  const auto stored = dtype.value_or(c10::get_default_dtype_as_scalartype());
  if (length <= 1 || !at::isFloatingType(stored) || layout.value_or(at::kStrided) != at::kStrided) {
    return at::native::kaiser_window(length, periodic, beta, dtype, layout, device, pin_memory); // or raises the error
  }
  const auto computed = stored == at::kDouble ? at::kDouble : at::kFloat;
  const double middle = static_cast<double>(periodic ? length : length - 1) / 2;
  const auto options = at::TensorOptions().dtype(computed).device(device).pinned_memory(pin_memory);
  const at::Tensor x = at::arange(length, options).sub_(middle).div_(middle);
  const at::Scalar at_middle = at::special_i0(at::scalar_tensor(beta, at::TensorOptions(computed))).item();
  return at::special_i0(x.square_().neg_().add_(1).sqrt_().mul_(beta)).div_(at_middle).to(stored);
}

at::Tensor kaiser_window_periodic(
    int64_t length,
    bool periodic,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  return kaiser_window(length, periodic, 12.0, dtype, layout, device, pin_memory);
}

at::Tensor kaiser_window_default(
    int64_t length,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  return kaiser_window(length, /*periodic=*/true, 12.0, dtype, layout, device, pin_memory);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("kaiser_window.beta", &kaiser_window);
  m.impl("kaiser_window.periodic", &kaiser_window_periodic);
  m.impl("kaiser_window", &kaiser_window_default);
}

} // namespace
} // namespace backplane
