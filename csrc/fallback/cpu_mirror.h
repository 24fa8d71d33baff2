// CPU tensors that stand in for bp tensors while a CPU kernel runs.
//
// On a device with host-accessible memory a stand-in shares the bp tensor's memory; on any other it is a copy that is
// written back. Either way the stand-ins of tensors that share storage share storage too, with the same strides, so that
// in-place kernels, views and overlapping arguments behave as on the CPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "devices/device.h"

namespace backplane {

struct Runs; // cpu_mirror.cpp

class CpuMirror {
 public:
  // Kernels run between construction and finish(). Work that the device's current stream still has is waited for.
  // `notes`: that the host waits is told to torch.bp.set_sync_debug_mode, on devices that else work by themselves.
  explicit CpuMirror(c10::DeviceIndex index, bool notes = true);
  // For kernels that run later, in stream order, on host-accessible memory: nothing is waited for, and there is no finish().
  // The stand-ins outlive this, and own no memory.
  static CpuMirror for_later(c10::DeviceIndex index) {
    return CpuMirror(Later{}, index);
  }
  ~CpuMirror();
  CpuMirror(const CpuMirror&) = delete;
  CpuMirror& operator=(const CpuMirror&) = delete;

  // True where stand-ins are copies.
  bool copies() const {
    return copies_;
  }

  c10::DeviceIndex index() const {
    return index_;
  }

  // The stand-in of a bp tensor of this device. `written`: the kernel may write to it.
  at::Tensor stand_in(const at::Tensor& tensor, bool written);

  // For devices whose stand-ins are copies: reads every storage, after all stand-ins are known. To be called before the
  // kernel runs.
  void load();

  // Makes what the kernel did to written stand-ins visible in the bp tensors: sizes, strides, storage, contents.
  void finish();

  // The bp tensor for a tensor that the kernel returned: the original for a stand-in, a view for a view of one, else a
  // new tensor, which takes the result's memory over where it can. After finish().
  at::Tensor result(at::Tensor tensor);

 private:
  struct Shared { // one storage and its stand-in
    c10::Storage original;
    c10::Storage stand_in;
    const void* data; // of the stand-in when it was made: differs afterwards if the kernel resized it
    size_t first = 0; // bytes [first, last) of the original are copied; only used where stand-ins are copies
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
  bool in_flight_ = false; // a transfer was queued and not waited for
  c10::SmallVector<Shared, 6> shared_;
  c10::SmallVector<Entry, 6> entries_;
};

} // namespace backplane
