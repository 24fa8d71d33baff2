// Lets a tensor take over another's contents across CPU and bp: `tensor.data = …`, and with it `module.to("bp")`.
//
// c10 knows by name which dense backends may do that, and PrivateUse1 is not among them. Where the answer is no,
// `module.to` makes new parameters instead of moving those that are there: tied weights come apart, and an optimizer
// made before keeps the old ones.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace backplane {
namespace {

bool is_plain(const at::Tensor& tensor) {
  const bool known_device = tensor.is_privateuseone() || tensor.is_cpu() || tensor.is_cuda();
  const bool dense = tensor.key_set().has_any(c10::DispatchKeySet(c10::DispatchKey::Dense));
  return known_device && dense && tensor.layout() == c10::kStrided;
}

bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return self.key_set() == from.key_set() || (is_plain(self) && is_plain(from));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

} // namespace
} // namespace backplane
