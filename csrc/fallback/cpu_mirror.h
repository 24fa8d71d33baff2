// CPU tensors that stand in for bp tensors while a CPU kernel runs.
//
// If the device's memory is host-accessible, a stand-in shares the bp tensor's memory; otherwise it is a copy that is
// written back. Stand-ins have the strides of their tensors, and stand-ins of tensors that share a storage share one
// too. In-place kernels, views and overlapping arguments therefore behave as on the CPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "devices/device.h"

namespace backplane {

struct Runs; // cpu_mirror.cpp

class CpuMirror {
 public:
  // For a kernel that runs between construction and finish(). Waits for the device's current stream.
  // `notes`: report the wait to torch.bp.set_sync_debug_mode, unless the host runs all operators of the device anyway.
  explicit CpuMirror(c10::DeviceIndex index, bool notes = true);
  // For kernels that run later, in stream order, on host-accessible memory. Does not wait, and needs no finish(). The
  // stand-ins may outlive the mirror, and do not own their memory.
  static CpuMirror for_later(c10::DeviceIndex index) {
    return CpuMirror(Later{}, index);
  }
  ~CpuMirror();
  CpuMirror(const CpuMirror&) = delete;
  CpuMirror& operator=(const CpuMirror&) = delete;

  // Whether stand-ins are copies.
  bool copies() const {
    return copies_;
  }

  c10::DeviceIndex index() const {
    return index_;
  }

  // The stand-in of a bp tensor of this device. `written`: the kernel may write to it.
  at::Tensor stand_in(const at::Tensor& tensor, bool written);

  // Reads the storages, if stand-ins are copies. Call after all stand-ins are made and before the kernel runs.
  void load();

  // Applies the kernel's changes to written stand-ins to the bp tensors: sizes, strides, storage, contents.
  void finish();

  // The bp tensor for a tensor that the kernel returned: the original for a stand-in, a view for a view of a stand-in,
  // and otherwise a new tensor, which takes over the result's memory if possible. Call after finish().
  at::Tensor result(at::Tensor tensor);

 private:
  struct Shared { // one storage and its stand-in
    c10::Storage original;
    c10::Storage stand_in;
    const void* data; // of the stand-in before the kernel runs; differs afterwards if the kernel resized it
    size_t first = 0; // bytes [first, last) of the original are copied, if stand-ins are copies
    size_t last = 0;
    bool written = false;
  };
  struct Entry {
    at::Tensor original;
    at::Tensor stand_in;
    size_t shared; // index into shared_
    bool written;
  };

  struct Later {};
  CpuMirror(Later, c10::DeviceIndex index);

  size_t share(const at::Tensor& tensor, bool written);
  void transfer(void* destination, const void* source, size_t bytes, CopyKind kind);
  c10::SmallVector<Runs, 2> runs_in(const Shared& shared, bool written) const;
  void settle();
  void will_write(Shared& shared);
  void take_over(Shared& shared);
  void write_back();
  c10::Storage adopt(const c10::Storage& storage);

  const c10::DeviceIndex index_;
  Device& device_;
  const bool copies_;
  bool in_flight_ = false; // transfers were queued since the last settle()
  c10::SmallVector<Shared, 6> shared_;
  c10::SmallVector<Entry, 6> entries_;
};

} // namespace backplane
