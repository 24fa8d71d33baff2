// Copies: between the CPU and bp, within a bp device and between two of them.
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "aten/copies.h"
#include "c10/storage.h"
#include "devices/operator_scope.h"
#include "devices/profile.h"
#include "fallback/cpu_mirror.h"
#include "fallback/deferred.h"
#include "memory/allocator.h"
#include "memory/pinned.h"
#include "plans/recorder.h"
#include "streams/capture.h"
#include "streams/stream.h"
#include "streams/submit.h"
#include "streams/sync_debug.h"

namespace backplane {
namespace {

bool runs_kernels(const Device& device) {
  return !device.properties().dialect.empty();
}

} // namespace

CopyMethod copy_method(const CopyFacts& facts) {
  if (!facts.is_alike()) {
    return CopyMethod::Elements;
  }
  if (facts.shares_storage() && facts.starts_alike()) {
    return CopyMethod::Nothing; // also for expanded tensors, as in PyTorch
  }
  return facts.is_dense() ? CopyMethod::Bytes : CopyMethod::Elements;
}

namespace {

bool is_bp(const at::Tensor& tensor) {
  return tensor.device().is_privateuseone();
}

class TensorFacts final : public CopyFacts {
 public:
  TensorFacts(const at::Tensor& source, const at::Tensor& destination) : source_(source), destination_(destination) {}

  bool is_alike() const override {
    return source_.scalar_type() == destination_.scalar_type() && source_.is_conj() == destination_.is_conj() &&
        source_.is_neg() == destination_.is_neg() && source_.sizes() == destination_.sizes() &&
        source_.strides() == destination_.strides();
  }
  bool shares_storage() const override {
    return source_.is_alias_of(destination_);
  }
  bool starts_alike() const override {
    return source_.storage_offset() == destination_.storage_offset();
  }
  bool is_dense() const override {
    return source_.is_non_overlapping_and_dense();
  }

 private:
  const at::Tensor& source_;
  const at::Tensor& destination_;
};

// Waits for the stream, or, for a non-blocking copy with pinned memory, records that the stream uses the memory.
void settle_host_side(const at::Tensor& host, c10::Stream stream, bool non_blocking) {
  const auto& pointer = host.storage().data_ptr();
  if (non_blocking && is_pinned(pointer.get()) &&
      pinned_allocator().record_event(pointer.get(), pointer.get_context(), stream)) {
    return;
  }
  synchronize_stream(stream);
}

void copy_bytes(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  const size_t bytes = source.nbytes();
  WriteWatch::wrote(destination.storage());
  void* to = destination.mutable_data_ptr(); // first: it can change the address of a source in the same storage
  const void* from = source.const_data_ptr();
  if (to == from) {
    return;
  }
  const bool both = is_bp(source) && is_bp(destination);
  const auto index = is_bp(destination) ? destination.device().index() : source.device().index();
  const auto stream = current_stream(index);
  const auto kind = both   ? CopyKind::WithinDevice
      : is_bp(destination) ? CopyKind::HostToDevice
                           : CopyKind::DeviceToHost;
  if (auto* recorder = Recorder::active()) {
    if (both) {
      recorder->copied(destination, source, bytes);
      if (recorder->is_dry()) {
        return;
      }
    } else {
      recorder->cannot_replay("it copies between the device and the CPU");
    }
  }
  const at::Tensor& host = is_bp(destination) ? source : destination;
  const bool waits = !both && !(non_blocking && is_pinned(host.storage().data_ptr().get()));
  const Submitter submitter(stream);
  const bool captures = submitter.capture() != nullptr;
  if (C10_UNLIKELY(captures && waits)) {
    submitter.capture()->refuse(
        "it copies between the device and the CPU, other than with non_blocking=True and pinned memory");
  }
  if (waits) {
    note_synchronization();
  }
  submitter.submit(Copy{to, from, bytes, kind}, {}, both ? c10::Storage() : host.storage());
  if (!both && !captures) {
    settle_host_side(host, stream, non_blocking);
  }
}

// Copies between two devices. The destination's stream waits for the source's stream, and afterwards the source's
// stream waits for the copy, so that neither memory is reused too early.
void copy_bytes_between(const at::Tensor& source, const at::Tensor& destination) {
  note_not_replayable("it copies between two devices");
  WriteWatch::wrote(destination.storage());
  const auto from_index = source.device().index();
  const auto to_index = destination.device().index();
  Device& from = device(from_index);
  Device& to = device(to_index);
  const auto from_stream = current_stream(from_index);
  const auto to_stream = current_stream(to_index);
  const auto order = [](c10::Stream first, c10::Stream second) {
    Event* event = record_event(nullptr, first, /*timing=*/false);
    block_stream(event, second);
    destroy_event(event);
  };
  order(from_stream, to_stream);
  bool done = false;
  {
    const auto handle = stream_handle(to_stream);
    DeviceCall call(from.needs_gil() || to.needs_gil());
    const ProfiledCommand profiled(Activity::Kind::Copy, to_index, handle, "Memcpy PtoP", source.nbytes());
    done = to.copy_from_peer(destination.mutable_data_ptr(), from, source.const_data_ptr(), source.nbytes(), handle);
  }
  if (done) {
    order(to_stream, from_stream);
    return;
  }
  const at::Tensor host = at::empty_like(source, source.options().device(at::kCPU));
  copy_bytes(source, host, /*non_blocking=*/false);
  copy_bytes(host, destination, /*non_blocking=*/false);
}

// The elements as stored in memory, without conjugate and negative bits.
at::Tensor without_lazy_bits(const at::Tensor& tensor) {
  if (!tensor.is_conj() && !tensor.is_neg()) {
    return tensor;
  }
  const at::Tensor stored = at::alias(tensor);
  stored._set_conj(false);
  stored._set_neg(false);
  return stored;
}

// Copies within a device, with any dtypes and strides, in stream order. On devices that run kernels, by a planner
// (torch_backplane/operators/tensor_shape.py).
void copy_by_kernel(const at::Tensor& source, const at::Tensor& destination) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("backplane::copy_elements", "")
                             .typed<void(const at::Tensor&, const at::Tensor&, bool, bool)>();
  op.call(
      without_lazy_bits(source), without_lazy_bits(destination), source.is_conj() != destination.is_conj(),
      source.is_neg() != destination.is_neg());
}

// Copies with the CPU's copy kernel on stand-ins, with any dtypes, strides and conjugate bits. At most one bp device.
void copy_elements(const at::Tensor& source, const at::Tensor& destination) {
  CpuMirror mirror(is_bp(destination) ? destination.device().index() : source.device().index());
  at::Tensor from = is_bp(source) ? mirror.stand_in(source, false) : source;
  at::Tensor to = is_bp(destination) ? mirror.stand_in(destination, true) : destination;
  mirror.load();
  {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  }
  mirror.finish();
}

// Whether a large tensor's elements fill at most half of the memory range that it covers.
bool is_spread(const at::Tensor& tensor) {
  constexpr int64_t kMinElements = 1 << 14; // copying fewer takes less time than launching a kernel
  int64_t reach = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    reach += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return reach >= kMinElements && reach / 2 >= tensor.numel();
}

// Whether to pack the elements for a copy between the CPU and a device that runs kernels and is not host-accessible.
bool is_to_be_packed(const at::Tensor& source, const at::Tensor& destination) {
  const at::Tensor& there = is_bp(source) ? source : destination;
  const Device& owner = device(there.device().index());
  return is_bp(source) != is_bp(destination) && !owner.properties().host_accessible() && runs_kernels(owner) &&
      is_spread(there);
}

// Transfers the elements contiguously. A kernel on the device gathers or scatters them.
void copy_packed(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  if (is_bp(source)) {
    const at::Tensor packed = at::empty(source.sizes(), source.options());
    copy_by_kernel(source, packed);
    destination.copy_(packed, non_blocking);
  } else {
    const at::Tensor packed = at::empty(destination.sizes(), destination.options());
    packed.copy_(source, non_blocking);
    copy_by_kernel(packed, destination);
  }
}

constexpr c10::DispatchKeySet kLazyBits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (C10_LIKELY(!(self.key_set() | source.key_set()).has_any(kLazyBits))) {
    return at::native::copy_(self, source, non_blocking);
  }
  // copy_from() handles these bits. PyTorch's fallbacks for them would recurse endlessly through copy_() and
  // _copy_from.
  const c10::impl::ExcludeDispatchKeyGuard guard(kLazyBits);
  return at::native::copy_(self, source, non_blocking);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  static const std::string name = "aten::_copy_from";
  const OperatorScope scope(name);
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - kLazyBits; // see copy_()
  const c10::impl::ForceDispatchKeyGuard guard(keys);
  TORCH_CHECK(source.defined() && destination.defined(), "source and destination of a copy must be defined tensors");
  const CopyMethod method = copy_method(TensorFacts(source, destination));
  if (method == CopyMethod::Nothing) {
    return destination;
  }
  // The checks of TensorIterator, which copies by the device bypass.
  at::assert_no_internal_overlap(destination);
  at::assert_no_partial_overlap(destination, source);
  if (source.sizes() != destination.sizes()) { // PyTorch leaves the check to the kernel
    const auto shape = at::infer_size_dimvector(destination.sizes(), source.sizes());
    TORCH_CHECK(
        destination.sizes() == shape, "output with shape ", destination.sizes(), " doesn't match the broadcast shape ",
        at::IntArrayRef(shape));
  }
  if (destination.numel() == 0) {
    return destination;
  }
  if (is_bp(source) && is_bp(destination) && source.device() != destination.device()) {
    // Transfer the bytes unchanged, and convert on the destination's device.
    if (method == CopyMethod::Bytes) {
      copy_bytes_between(source, destination);
    } else if (!device(destination.device().index()).properties().supports(source.scalar_type())) {
      destination.copy_(source.to(at::kCPU)); // the destination's device does not support the source's dtype
    } else {
      const at::Tensor dense = source.is_non_overlapping_and_dense() ? source : source.contiguous();
      at::Tensor moved = at::empty_like(dense, dense.options().device(destination.device()));
      moved._set_conj(dense.is_conj());
      moved._set_neg(dense.is_neg());
      copy_bytes_between(dense, moved);
      destination.copy_(moved);
    }
  } else if (method == CopyMethod::Bytes) {
    copy_bytes(source, destination, non_blocking);
  } else if (
      is_bp(source) && is_bp(destination) &&
      (runs_kernels(device(source.device().index())) || defers(source.device().index()))) {
    copy_by_kernel(source, destination);
  } else if (is_to_be_packed(source, destination)) {
    copy_packed(source, destination, non_blocking);
  } else {
    copy_elements(source, destination);
  }
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  static const std::string name = "aten::_local_scalar_dense";
  const OperatorScope scope(name);
  note_synchronization();
  CpuMirror mirror(self.device().index(), /*notes=*/false);
  const at::Tensor host = mirror.stand_in(self, false);
  mirror.load();
  return at::native::_local_scalar_dense_cpu(host);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
}

// For calls that the planner leaves to the CPU: copies the elements, conjugated and negated if requested.
void copy_elements_on_cpu(const at::Tensor& source, const at::Tensor& destination, bool conjugate, bool negate) {
  const at::Tensor conjugated = conjugate ? source.conj() : source;
  destination.copy_(negate ? conjugated._neg_view() : conjugated);
}

TORCH_LIBRARY_FRAGMENT(backplane, m) {
  m.def("copy_elements(Tensor source, Tensor(a!) destination, bool conjugate, bool negate) -> ()");
  m.impl("copy_elements", c10::DispatchKey::CPU, &copy_elements_on_cpu);
  m.impl("copy_elements", c10::DispatchKey::Meta, [](const at::Tensor&, const at::Tensor&, bool, bool) {});
}

} // namespace
} // namespace backplane
