// A C++ custom operator as a user would write it: a schema, a CPU kernel, a bp kernel and a meta kernel.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace {

// x * scale + shift. The bp kernel uses it as well, because the memory is host-accessible.
at::Tensor run(const at::Tensor& x, double scale, double shift) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, "scale_shift: expected a float tensor, and got ", x.scalar_type());
  const at::Tensor dense = x.contiguous();
  at::Tensor result = at::empty_like(dense);
  const float* from = dense.const_data_ptr<float>();
  float* to = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < dense.numel(); ++i) {
    to[i] = static_cast<float>(from[i] * scale + shift);
  }
  return result;
}

int64_t bp_calls = 0;

at::Tensor scale_shift_bp(const at::Tensor& x, double scale, double shift) {
  TORCH_CHECK(x.device().is_privateuseone(), "expected a bp tensor");
  ++bp_calls;
  return run(x, scale, shift);
}

at::Tensor scale_shift_meta(const at::Tensor& x, double, double) {
  return at::empty_like(x);
}

int64_t calls() {
  return bp_calls;
}

TORCH_LIBRARY(backplane_cpp_test, m) {
  m.def("scale_shift(Tensor x, float scale, float shift) -> Tensor");
  m.def("cpu_only(Tensor x, float scale, float shift) -> Tensor");
  m.def("bp_calls() -> int", &calls);
}

TORCH_LIBRARY_IMPL(backplane_cpp_test, CPU, m) {
  m.impl("scale_shift", &run);
  m.impl("cpu_only", &run);
}

TORCH_LIBRARY_IMPL(backplane_cpp_test, PrivateUse1, m) {
  m.impl("scale_shift", &scale_shift_bp);
}

TORCH_LIBRARY_IMPL(backplane_cpp_test, Meta, m) {
  m.impl("scale_shift", &scale_shift_meta);
}

} // namespace
