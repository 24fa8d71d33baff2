// Runs a recorded sequence of allocations and frees at full speed, for benchmarks/allocator.py.
#include "bindings.h"
#include "memory/allocator.h"
#include "memory/caching_allocator.h"
#include "streams/stream.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdlib>
#include <ctime>

namespace py = pybind11;

namespace backplane {

namespace {

struct AllocatorEvent {
  int64_t slot;
  int64_t size; // bytes to allocate into the slot; -1: free the slot
};

// CPU time of this thread, which other processes on the machine affect least.
double cpu_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

template <typename Allocate, typename Free>
double replay(const AllocatorEvent* events, size_t count, std::vector<void*>& slots, Allocate allocate, Free release) {
  double start = cpu_nanoseconds();
  for (size_t i = 0; i < count; ++i) {
    void*& slot = slots[events[i].slot];
    if (events[i].size < 0) {
      release(slot);
      slot = nullptr;
    } else {
      slot = allocate(static_cast<size_t>(events[i].size));
    }
  }
  double elapsed = cpu_nanoseconds() - start;
  for (void*& slot : slots) {
    if (slot != nullptr) {
      release(slot);
      slot = nullptr;
    }
  }
  return elapsed;
}

// Returns the CPU time in nanoseconds for all events, which are pairs of int64 (slot, size). `allocator` is "bp" (for
// the current device), "data_ptr" (the same through c10's interface, as operators use it) or "malloc" (posix_memalign
// to 512 bytes).
double replay_events(const py::buffer& buffer, const std::string& allocator) {
  py::buffer_info info = buffer.request();
  TORCH_CHECK_VALUE(
      info.itemsize == sizeof(int64_t) && info.ndim == 1 && info.size % 2 == 0,
      "expected a flat buffer of pairs of 64-bit integers");
  const auto* events = static_cast<const AllocatorEvent*>(info.ptr);
  auto count = static_cast<size_t>(info.size / 2);
  int64_t slots = 0;
  for (size_t i = 0; i < count; ++i) {
    TORCH_CHECK_VALUE(events[i].slot >= 0, "slots must not be negative, but got ", events[i].slot);
    slots = std::max(slots, events[i].slot + 1);
  }
  std::vector<void*> held(static_cast<size_t>(slots), nullptr);
  py::gil_scoped_release no_gil;
  if (allocator == "bp") {
    c10::Stream stream = current_stream(current_device());
    return replay(
        events, count, held, [&](size_t size) { return raw_allocate(stream, size); }, [](void* p) { raw_free(p); });
  }
  if (allocator == "data_ptr") {
    c10::DeviceAllocator& all = caching_allocator();
    return replay(
        events, count, held, [&](size_t size) { return all.allocate(size).release_context(); },
        [deleter = all.raw_deleter()](void* p) { deleter(p); });
  }
  TORCH_CHECK_VALUE(allocator == "malloc", "allocator must be 'bp', 'data_ptr' or 'malloc', not '", allocator, "'");
  auto allocate = [](size_t size) {
    void* result = nullptr;
    TORCH_CHECK(posix_memalign(&result, 512, size) == 0, "malloc could not allocate ", size, " bytes");
    return result;
  };
  return replay(events, count, held, allocate, [](void* p) { std::free(p); });
}

} // namespace

void bind_allocator_replay(py::module_& module) {
  module.def(
      "_memory_replay", torch::wrap_pybind_function(&replay_events), py::arg("events"), py::arg("allocator"),
      "Return the CPU time in nanoseconds of a sequence of allocations and frees.");
}

} // namespace backplane
