// Creates and resizes the storages of bp tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace backplane {

inline constexpr c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};

// A storage of `bytes` uninitialized bytes on bp:`index`.
c10::Storage make_storage(c10::DeviceIndex index, size_t bytes);

// A tensor over `storage`, without autograd history.
at::Tensor make_tensor(
    c10::Storage storage,
    caffe2::TypeMeta dtype,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    int64_t storage_offset = 0);

// Changes a storage's size in bytes and keeps its contents up to the smaller of the two sizes.
void resize_storage(c10::StorageImpl* storage, size_t bytes);

// Throws TypeError if the device does not support the dtype.
void check_dtype(c10::DeviceIndex index, c10::ScalarType dtype);

} // namespace backplane
