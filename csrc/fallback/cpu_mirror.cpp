#include "fallback/cpu_mirror.h"

#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "c10/storage.h"
#include "devices/recording.h"
#include "fallback/cpu_memory.h"
#include "memory/allocator.h"
#include "streams/capture.h"
#include "streams/stream.h"
#include "streams/submit.h"
#include "streams/sync_debug.h"
#include "streams/sync_watch.h"

namespace backplane {

// The contiguous runs of a tensor's elements in its storage: a strided grid of runs of equal length.
struct Runs {
  size_t first; // byte offset of the first run
  size_t bytes; // of each run
  size_t count = 1;
  c10::DimVector sizes, strides; // of the grid; strides in bytes
};

namespace {

// Protected members of TensorImpl that must change when a tensor moves to another device. c10 has no setters for them,
// and every alternative allocates a second TensorImpl for each result of each operator.
struct Members : c10::TensorImpl {
  static constexpr auto keys() {
    return &Members::key_set_;
  }
  static constexpr auto device() {
    return &Members::device_opt_;
  }
};

void move_to_bp(c10::TensorImpl* impl, c10::Device device) {
  auto& keys = impl->*Members::keys();
  // Every tensor has its device's autocast key. Tensors made in inference mode have no autograd key.
  const bool autograd = keys.has(c10::DispatchKey::AutogradCPU);
  keys = keys.remove_backend(c10::BackendComponent::CPUBit).remove(c10::DispatchKey::AutocastCPU) |
      c10::DispatchKeySet{c10::DispatchKey::PrivateUse1, c10::DispatchKey::AutocastPrivateUse1};
  if (autograd) {
    keys = keys.add(c10::DispatchKey::AutogradPrivateUse1);
  }
  impl->*Members::device() = device;
}

void no_delete(void*) {}

// The byte range [first, last) of its storage that a tensor covers.
std::pair<size_t, size_t> reach(const at::Tensor& tensor) {
  const size_t item = tensor.dtype().itemsize();
  const size_t first = tensor.storage_offset() * item;
  if (tensor.numel() == 0) {
    return {first, first};
  }
  size_t span = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    span += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {first, first + span * item};
}

Runs runs_of(const at::Tensor& tensor) {
  const size_t item = tensor.dtype().itemsize();
  Runs runs{tensor.storage_offset() * item, item};
  c10::SmallVector<std::pair<int64_t, int64_t>, 6> dims; // (stride in bytes, size)
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) != 1 && tensor.stride(dim) != 0) {
      dims.emplace_back(tensor.stride(dim) * item, tensor.size(dim));
    }
  }
  std::sort(dims.begin(), dims.end());
  for (const auto& [stride, size] : dims) {
    if (runs.sizes.empty() && static_cast<size_t>(stride) <= runs.bytes) {
      runs.bytes += (size - 1) * stride;
    } else {
      runs.sizes.push_back(size);
      runs.strides.push_back(stride);
      runs.count *= size;
    }
  }
  return runs;
}

// The fixed cost of a transfer, in bytes that could be transferred in the same time.
constexpr size_t kTransferBytes = 1 << 16;

// Calls transfer(first, bytes) for each run, or once for [first, last) if that is cheaper.
template <typename Transfer>
void transfer_each(c10::ArrayRef<Runs> all, size_t first, size_t last, const Transfer& transfer) {
  size_t count = 0;
  for (const Runs& runs : all) {
    count += runs.count;
  }
  if (count >= (last - first) / kTransferBytes) {
    transfer(first, last - first);
    return;
  }
  for (const Runs& runs : all) {
    c10::DimVector at(runs.sizes.size(), 0);
    for (size_t run = 0; run < runs.count; ++run) {
      size_t from = runs.first;
      for (size_t dim = 0; dim < at.size(); ++dim) {
        from += at[dim] * runs.strides[dim];
      }
      if (from < last) {
        transfer(from, std::min(runs.bytes, last - from));
      }
      for (size_t dim = 0; dim < at.size() && ++at[dim] == runs.sizes[dim]; ++dim) {
        at[dim] = 0;
      }
    }
  }
}

// Copies the conjugate and negative bits of `source` to `target`.
void set_bits(const at::Tensor& target, const at::Tensor& source) {
  if (C10_UNLIKELY(source.is_conj() != target.is_conj())) {
    target._set_conj(source.is_conj());
  }
  if (C10_UNLIKELY(source.is_neg() != target.is_neg())) {
    target._set_neg(source.is_neg());
  }
}

} // namespace

CpuMirror::CpuMirror(c10::DeviceIndex index, bool notes)
    : index_(checked_index(index)), device_(device(index_)), copies_(!device_.properties().host_accessible()) {
  const char* what = "it runs code on the CPU, or reads a value there";
  note_not_replayable(what);
  if (const auto capture = Capture::of(current_stream(index_)); C10_UNLIKELY(capture != nullptr)) {
    capture->refuse(what);
  }
  if (notes && (copies_ || !device_.properties().dialect.empty())) {
    note_synchronization();
  }
  if (!copies_) {
    std::optional<SyncWatch::Hidden> hidden;
    if (device_.properties().dialect.empty()) { // the host runs the device's operators: not a wait of the program
      hidden.emplace();
    }
    synchronize_stream(current_stream(index_));
  }
}

CpuMirror::CpuMirror(Later, c10::DeviceIndex index) : index_(index), device_(device(index)), copies_(false) {}

size_t CpuMirror::share(const at::Tensor& tensor, bool written) {
  const c10::Storage& storage = tensor.storage();
  auto* impl = storage.unsafeGetStorageImpl();
  size_t slot = 0;
  while (slot < shared_.size() && shared_[slot].original.unsafeGetStorageImpl() != impl) {
    ++slot;
  }
  if (slot == shared_.size()) {
    Shared shared;
    shared.original = storage;
    void* data = copies_ ? nullptr : impl->data_ptr().get();
    shared.data = data;
    shared.stand_in = c10::Storage(
        c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(impl->nbytes()),
            c10::DataPtr(data, data, no_delete, c10::Device(c10::kCPU)), c10::GetCPUAllocator(), impl->resizable()));
    std::tie(shared.first, shared.last) = reach(tensor);
    shared_.push_back(std::move(shared));
  } else if (copies_) {
    const auto [first, last] = reach(tensor);
    shared_[slot].first = std::min(shared_[slot].first, first);
    shared_[slot].last = std::max(shared_[slot].last, last);
  }
  if (written) {
    will_write(shared_[slot]);
  }
  return slot;
}

// Marks the storage as written, and materializes it if it is copy-on-write.
void CpuMirror::will_write(Shared& shared) {
  shared.written = true;
  WriteWatch::wrote(shared.original);
  void* data = shared.original.unsafeGetStorageImpl()->mutable_data();
  if (C10_UNLIKELY(!copies_ && data != shared.data)) {
    shared.data = data;
    shared.stand_in.unsafeGetStorageImpl()->set_data_ptr_noswap(
        c10::DataPtr(data, data, no_delete, c10::Device(c10::kCPU)));
  }
}

at::Tensor CpuMirror::stand_in(const at::Tensor& tensor, bool written) {
  for (auto& entry : entries_) {
    if (entry.original.is_same(tensor)) {
      if (written) {
        entry.written = true;
        will_write(shared_[entry.shared]);
      }
      return entry.stand_in;
    }
  }
  if (tensor._is_zerotensor()) { // has no memory, and is never written
    return at::zeros(tensor.sizes(), tensor.options().device(at::kCPU));
  }
  const size_t slot = share(tensor, written);
  auto stand_in = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(shared_[slot].stand_in), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  stand_in.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  set_bits(stand_in, tensor);
  entries_.push_back(Entry{tensor, stand_in, slot, written});
  return stand_in;
}

// Queues a transfer. settle() waits for all queued transfers.
void CpuMirror::transfer(void* destination, const void* source, size_t bytes, CopyKind kind) {
  if (bytes > 0) {
    in_flight_ = true;
    const c10::Stream stream = current_stream(index_);
    submit_now(stream, stream_handle(stream), Copy{destination, source, bytes, kind});
  }
}

// The runs of all stand-ins (only the written ones, if `written`) that have elements in this storage.
c10::SmallVector<Runs, 2> CpuMirror::runs_in(const Shared& shared, bool written) const {
  c10::SmallVector<Runs, 2> all;
  for (const auto& entry : entries_) {
    if (&shared_[entry.shared] == &shared && (entry.written || !written) && entry.stand_in.numel() > 0 &&
        entry.stand_in.storage().unsafeGetStorageImpl() == shared.stand_in.unsafeGetStorageImpl()) {
      all.push_back(runs_of(entry.stand_in));
    }
  }
  return all;
}

void CpuMirror::settle() {
  if (in_flight_) {
    synchronize_stream(current_stream(index_));
    in_flight_ = false;
  }
}

CpuMirror::~CpuMirror() {
  try {
    settle(); // after an exception, the host memory must outlive the queued copies
  } catch (const std::exception&) {
    // Ignored in favor of the original exception.
  }
}

void CpuMirror::load() {
  if (!copies_) {
    return;
  }
  DeviceCall call(device_);
  for (auto& shared : shared_) {
    // Allocate the whole storage, so that offsets stay the same. Read only the range that the tensors cover.
    const size_t bytes = shared.original.nbytes();
    c10::DataPtr copy = c10::GetCPUAllocator()->allocate(bytes);
    auto* data = static_cast<char*>(copy.get());
    shared.data = data;
    shared.stand_in.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(copy));
    const size_t last = std::min(shared.last, bytes);
    if (shared.first < last) {
      const auto* original = static_cast<const char*>(shared.original.data());
      transfer_each(runs_in(shared, /*written=*/false), shared.first, last, [&](size_t first, size_t count) {
        transfer(data + first, original + first, count, CopyKind::DeviceToHost);
      });
    }
  }
  settle();
}

// Moves or copies the contents of a stand-in that the kernel reallocated to the original storage.
void CpuMirror::take_over(Shared& shared) {
  auto* original = shared.original.unsafeGetStorageImpl();
  auto* stand_in = shared.stand_in.unsafeGetStorageImpl();
  if (is_bp_memory(*stand_in)) {
    c10::DataPtr memory = stand_in->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
    memory.unsafe_set_device(original->device());
    original->set_data_ptr_noswap(std::move(memory));
    original->set_nbytes(stand_in->nbytes());
    stand_in->set_data_ptr_noswap(
        c10::DataPtr(original->data_ptr().get(), original->data_ptr().get(), no_delete, c10::Device(c10::kCPU)));
    return;
  }
  resize_storage(original, stand_in->nbytes());
  transfer(original->mutable_data_ptr().get(), stand_in->data(), stand_in->nbytes(), CopyKind::HostToDevice);
}

// Copies the ranges that written stand-ins cover back to the original storages. Other bytes were never read, or no
// longer exist after a resize.
void CpuMirror::write_back() {
  for (auto& shared : shared_) {
    shared.first = SIZE_MAX;
    shared.last = 0;
  }
  for (const auto& entry : entries_) {
    Shared& shared = shared_[entry.shared];
    if (entry.written && entry.stand_in.numel() > 0 &&
        entry.stand_in.storage().unsafeGetStorageImpl() == shared.stand_in.unsafeGetStorageImpl()) {
      const auto [first, last] = reach(entry.stand_in);
      shared.first = std::min(shared.first, first);
      shared.last = std::max(shared.last, last);
    }
  }
  DeviceCall call(device_);
  for (auto& shared : shared_) {
    auto* original = shared.original.unsafeGetStorageImpl();
    if (shared.written && shared.stand_in.nbytes() != original->nbytes()) {
      resize_storage(original, shared.stand_in.nbytes());
    }
    if (shared.first < shared.last) {
      auto* data = static_cast<char*>(original->mutable_data_ptr().get());
      const auto* written = static_cast<const char*>(shared.stand_in.data());
      transfer_each(runs_in(shared, /*written=*/true), shared.first, shared.last, [&](size_t first, size_t count) {
        transfer(data + first, written + first, count, CopyKind::HostToDevice);
      });
    }
  }
}

void CpuMirror::finish() {
  for (auto& entry : entries_) {
    if (!entry.written) {
      continue;
    }
    auto* impl = entry.original.unsafeGetTensorImpl();
    Shared& shared = shared_[entry.shared];
    if (C10_UNLIKELY(entry.stand_in.storage().unsafeGetStorageImpl() != shared.stand_in.unsafeGetStorageImpl())) {
      impl->set_storage_keep_dtype(adopt(entry.stand_in.storage())); // the kernel called set_()
    }
    if (impl->sizes() != entry.stand_in.sizes() || impl->strides() != entry.stand_in.strides() ||
        impl->storage_offset() != entry.stand_in.storage_offset()) {
      impl->set_sizes_and_strides(entry.stand_in.sizes(), entry.stand_in.strides(), entry.stand_in.storage_offset());
    }
    set_bits(entry.original, entry.stand_in); // linalg.lu_solve sets the conjugate bit of its out=
  }
  if (copies_) {
    write_back();
  } else {
    for (auto& shared : shared_) {
      if (C10_UNLIKELY(shared.written && shared.stand_in.data() != shared.data)) {
        take_over(shared);
      }
    }
  }
  settle(); // the host copies are freed next
}

// Returns a bp storage with the contents of a CPU storage. Shares the memory if it is bp memory, otherwise copies it.
c10::Storage CpuMirror::adopt(const c10::Storage& storage) {
  const c10::Device target(c10::kPrivateUse1, index_);
  auto* impl = storage.unsafeGetStorageImpl();
  for (const auto& shared : shared_) {
    if (shared.stand_in.unsafeGetStorageImpl() == impl) {
      return shared.original;
    }
  }
  c10::Storage adopted;
  if (!copies_ && is_bp_memory(*impl)) {
    // Keeps the CPU storage alive instead of taking its memory: others can hold it too.
    auto* keeper = new c10::Storage(storage);
    adopted = c10::Storage(
        c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(impl->nbytes()),
            c10::DataPtr(
                impl->data_ptr().get(), keeper, [](void* context) { delete static_cast<c10::Storage*>(context); },
                target),
            &allocator_of(index_),
            /*resizable=*/true));
  } else {
    adopted = make_storage(index_, impl->nbytes());
    transfer(adopted.mutable_data(), impl->data(), impl->nbytes(), CopyKind::HostToDevice);
    settle();
  }
  // Remember it, so that results that share a storage still share one.
  Shared shared;
  shared.original = adopted;
  shared.stand_in = storage;
  shared.data = storage.data();
  shared_.push_back(std::move(shared));
  return adopted;
}

at::Tensor CpuMirror::result(at::Tensor tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  for (const auto& entry : entries_) {
    if (entry.stand_in.is_same(tensor)) {
      return entry.original;
    }
  }
  if (C10_UNLIKELY(!tensor.is_cpu())) {
    return tensor;
  }
  if (C10_UNLIKELY(!device_.properties().supports(tensor.scalar_type()))) {
    check_dtype(index_, tensor.scalar_type()); // throws
  }
  auto* impl = tensor.unsafeGetTensorImpl();
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (!copies_ && tensor.use_count() == 1 && tensor.storage().use_count() == 1 && is_bp_memory(*storage)) {
    const c10::Device target(c10::kPrivateUse1, index_);
    storage->mutable_data_ptr().unsafe_set_device(target);
    storage->set_allocator(&allocator_of(index_));
    move_to_bp(impl, target);
    return tensor;
  }
  auto made =
      make_tensor(adopt(tensor.storage()), tensor.dtype(), tensor.sizes(), tensor.strides(), tensor.storage_offset());
  set_bits(made, tensor);
  return made;
}

} // namespace backplane
