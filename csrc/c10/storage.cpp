#include "c10/storage.h"

#include "devices/device.h"
#include "devices/recording.h"
#include "memory/allocator.h"
#include "streams/stream.h"
#include "streams/submit.h"

namespace backplane {

c10::Storage make_storage(c10::DeviceIndex index, size_t bytes) {
  // Not make_storage_impl: it treats the null pointer of 0 bytes as missing and allocates on the current device.
  return c10::Storage(
      c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(bytes), allocate_on(index, bytes),
          &allocator_of(index),
          /*resizable=*/true));
}

at::Tensor make_tensor(
    c10::Storage storage,
    caffe2::TypeMeta dtype,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    int64_t storage_offset) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kKeys, dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, storage_offset);
  return tensor;
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  note_not_replayable("it resizes a tensor that it was given");
  storage->mutable_data(); // ends copy-on-write, which c10 would otherwise assume of the new memory, too
  const auto index = storage->device().index();
  c10::DataPtr grown = allocate_on(index, bytes);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept > 0) {
    submit(current_stream(index), Copy{grown.get(), storage->data(), kept, CopyKind::WithinDevice});
  }
  // As in torch.cuda, nothing waits for the copy: the old memory returns to the pool of its stream, normally the same.
  storage->set_data_ptr_noswap(std::move(grown));
  storage->set_nbytes(bytes);
}

void check_dtype(c10::DeviceIndex index, c10::ScalarType dtype) {
  const auto& properties = device(index).properties();
  TORCH_CHECK_TYPE(
      properties.supports(dtype), "bp:", static_cast<int>(index), " (", properties.name, ") does not support ", dtype,
      "; `torch.bp.get_device_properties(", static_cast<int>(index), ").dtypes` lists what it supports");
}

} // namespace backplane
