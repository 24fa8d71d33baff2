// Allows `tensor.data = …` between CPU and bp tensors, which `module.to("bp")` relies on.
//
// c10 has a fixed list of dense backends that may do this, without PrivateUse1. If a pair is incompatible, `module.to`
// creates new parameters instead of moving the existing ones: tied weights separate, and an optimizer that was created
// earlier keeps the old parameters.
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
