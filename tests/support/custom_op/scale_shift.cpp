// C++ custom operators as a user would write them: one with a schema, a CPU kernel, a bp kernel and a meta kernel, and
// others with a CPU kernel only.
#include <ATen/core/List.h>
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

at::Tensor& sum_into(const c10::List<std::optional<at::Tensor>>& xs, at::Tensor& out) {
  out.resize_(0);
  for (const std::optional<at::Tensor> x : xs) {
    if (x.has_value()) {
      out.numel() == 0 ? out.resize_(x->sizes()).copy_(*x) : out.add_(*x);
    }
  }
  TORCH_CHECK(out.numel() > 0, "sum_into: expected a tensor, and got none");
  return out;
}

void halve_(at::Tensor& x) {
  x.mul_(0.5);
}

at::Tensor first_row(const at::Tensor& x) {
  return x.select(0, 0);
}

TORCH_LIBRARY(backplane_cpp_test, m) {
  m.def("scale_shift(Tensor x, float scale, float shift) -> Tensor");
  m.def("cpu_only(Tensor x, float scale, float shift) -> Tensor");
  m.def("sum_into(Tensor?[] xs, *, Tensor(a!) out) -> Tensor(a!)");
  m.def("halve_(Tensor(a!) x) -> ()");
  m.def("first_row(Tensor(a) x) -> Tensor(a)");
  m.def("bp_calls() -> int", &calls);
}

TORCH_LIBRARY_IMPL(backplane_cpp_test, CPU, m) {
  m.impl("scale_shift", &run);
  m.impl("cpu_only", &run);
  m.impl("sum_into", &sum_into);
  m.impl("halve_", &halve_);
  m.impl("first_row", &first_row);
}

TORCH_LIBRARY_IMPL(backplane_cpp_test, PrivateUse1, m) {
  m.impl("scale_shift", &scale_shift_bp);
}

TORCH_LIBRARY_IMPL(backplane_cpp_test, Meta, m) {
  m.impl("scale_shift", &scale_shift_meta);
}

} // namespace
