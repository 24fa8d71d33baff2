// Operators that create bp tensors or change their view of a storage: factories, views, resize_ and set_.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "c10/storage.h"
#include "devices/device.h"
#include "memory/allocator.h"
#include "streams/stream.h"

namespace backplane {
namespace {

// Checks the arguments common to all factories, and makes the device current while the storage is allocated.
class FactoryGuard {
 public:
  FactoryGuard(
      std::optional<c10::ScalarType> dtype,
      std::optional<c10::Layout> layout,
      std::optional<c10::Device> device,
      std::optional<bool> pin_memory)
      : dtype(c10::dtype_or_default(dtype)) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        c10::layout_or_default(layout) == c10::kStrided, "bp tensors must be strided; a tensor with layout ",
        c10::layout_or_default(layout), " cannot be created on bp");
    TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
    const auto index = checked_index(c10::device_or_default(device).index());
    check_dtype(index, this->dtype);
    previous_ = exchange_current_device(index);
  }

  ~FactoryGuard() {
    set_current_device_unchecked(previous_);
  }

  FactoryGuard(const FactoryGuard&) = delete;
  FactoryGuard& operator=(const FactoryGuard&) = delete;

  const c10::ScalarType dtype;

 private:
  c10::DeviceIndex previous_;
};

bool fills_uninitialized_memory() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

at::Tensor with_deterministic_fill(at::Tensor tensor) {
  if (C10_UNLIKELY(fills_uninitialized_memory())) {
    at::native::fill_empty_deterministic_(tensor);
  }
  return tensor;
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> memory_format) {
  const FactoryGuard guard(dtype, layout, device, pin_memory);
  return with_deterministic_fill(
      at::detail::empty_generic(size, &allocator_of(current_device()), kKeys, guard.dtype, memory_format));
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  const FactoryGuard guard(dtype, layout, device, pin_memory);
  return with_deterministic_fill(
      at::detail::empty_strided_generic(size, stride, &allocator_of(current_device()), kKeys, guard.dtype));
}

// Creates a tensor of zeros without memory. Autograd's forward mode uses it.
at::Tensor efficient_zero_tensor(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  const FactoryGuard guard(dtype, layout, device, pin_memory);
  at::native::ZeroTensorAllocator allocator(c10::Device(c10::kPrivateUse1, current_device()));
  const auto keys = kKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &allocator, keys, guard.dtype, std::nullopt);
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> memory_format) {
  at::detail::check_size_nonnegative(size);
  auto* impl = self.unsafeGetTensorImpl();
  const auto old_bytes = static_cast<int64_t>(self.storage().nbytes());
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    const size_t bytes =
        at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
    auto* storage = self.storage().unsafeGetStorageImpl();
    if (self.numel() > 0 && bytes > storage->nbytes()) {
      resize_storage(storage, bytes);
    }
  }
  if (memory_format.has_value()) {
    TORCH_CHECK(*memory_format != c10::MemoryFormat::Preserve, "Unsupported memory format", *memory_format);
    impl->empty_tensor_restride(*memory_format);
  }
  if (C10_UNLIKELY(fills_uninitialized_memory())) {
    at::native::fill_resize_deterministic_(self, old_bytes);
  }
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t storage_offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), storage_offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  if (stride.data() == nullptr) {
    impl->set_storage_offset(storage_offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, storage_offset);
  }
  const size_t bytes =
      at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize(), self.storage_offset());
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (self.numel() > 0 && bytes > storage->nbytes()) {
    resize_storage(storage, bytes);
  }
  return self;
}

at::Tensor& set_(at::Tensor& self) {
  return set_storage(self, make_storage(self.device().index(), 0), 0, {0}, {});
}

// Views with another dtype bypass the factories, so they check the dtype themselves.
at::Tensor view_dtype(const at::Tensor& self, c10::ScalarType dtype) {
  check_dtype(self.device().index(), dtype);
  return at::native::view_dtype(self, dtype);
}

at::Tensor view_as_complex(const at::Tensor& self) {
  if (c10::isFloatingType(self.scalar_type())) {
    check_dtype(self.device().index(), c10::toComplexType(self.scalar_type()));
  }
  return at::native::view_as_complex(self);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  caching_allocator().recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zero_tensor);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &view_as_complex);
  m.impl("view.dtype", &view_dtype);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("record_stream", &record_stream);
}

} // namespace
} // namespace backplane
