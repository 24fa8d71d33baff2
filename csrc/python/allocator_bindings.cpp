// Python bindings for torch.bp.memory: torch_backplane._C._memory_*.
#include "bindings.h"
#include "compat.h"
#include "memory/allocator.h"
#include "memory/allocator_config.h"
#include "memory/caching_allocator.h"
#include "memory/memory_snapshot.h"
#include "memory/pinned.h"
#include "memory/segment_map.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <future>
#include <thread>

namespace py = pybind11;

namespace backplane {

namespace {

using c10::CachingAllocator::DurationStat;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

py::dict to_dict(const Stat& stat) {
  py::dict result;
  result["current"] = stat.current;
  result["peak"] = stat.peak;
  result["allocated"] = stat.allocated;
  result["freed"] = stat.freed;
  return result;
}

py::dict to_dict(const StatArray& stats) {
  py::dict result;
  result["all"] = to_dict(stats[0]);
  result["small_pool"] = to_dict(stats[1]);
  result["large_pool"] = to_dict(stats[2]);
  return result;
}

py::dict to_dict(const DurationStat& stat) {
  py::dict result;
  result["total"] = stat.total;
  result["max"] = stat.max;
  result["min"] = stat.min;
  result["count"] = stat.count;
  result["avg"] = stat.count == 0 ? 0 : stat.total / stat.count;
  return result;
}

c10::CachingDeviceAllocator::DeviceStats device_stats(c10::DeviceIndex index) {
  py::gil_scoped_release no_gil;
  return caching_allocator().getDeviceStats(index);
}

py::dict stats(c10::DeviceIndex index) {
  const auto stats = device_stats(index);
  py::dict result;
  result["num_alloc_retries"] = stats.num_alloc_retries;
  result["num_ooms"] = stats.num_ooms;
  result["max_split_size"] = stats.max_split_size;
  result["num_sync_all_streams"] = stats.num_sync_all_streams;
  result["num_device_alloc"] = stats.num_device_alloc;
  result["num_device_free"] = stats.num_device_free;
  result["num_oom_rejections"] = compat::num_oom_rejections(stats);
  result["allocation"] = to_dict(stats.allocation);
  result["segment"] = to_dict(stats.segment);
  result["active"] = to_dict(stats.active);
  result["inactive_split"] = to_dict(stats.inactive_split);
  result["allocated_bytes"] = to_dict(stats.allocated_bytes);
  result["reserved_bytes"] = to_dict(stats.reserved_bytes);
  result["active_bytes"] = to_dict(stats.active_bytes);
  result["inactive_split_bytes"] = to_dict(stats.inactive_split_bytes);
  result["requested_bytes"] = to_dict(stats.requested_bytes);
  result["oversize_allocations"] = to_dict(stats.oversize_allocations);
  result["oversize_segments"] = to_dict(stats.oversize_segments);
  py::dict by_pool;
  compat::with_private_pool_stats(stats, [&](const auto& pools) {
    for (const auto& [id, reserved] : pools) {
      by_pool[py::make_tuple(id.first, id.second)] = to_dict(reserved);
    }
  });
  result["reserved_bytes_by_private_pools"] = by_pool;
  return result;
}

py::dict host_stats() {
  const auto stats = pinned_allocator().get_stats();
  py::dict result;
  result["num_host_alloc"] = stats.num_host_alloc;
  result["num_host_free"] = stats.num_host_free;
  result["allocations"] = to_dict(stats.allocations);
  result["active_requests"] = to_dict(stats.active_requests);
  result["allocated_bytes"] = to_dict(stats.allocated_bytes);
  result["active_bytes"] = to_dict(stats.active_bytes);
  result["host_alloc_time"] = to_dict(stats.host_alloc_time);
  result["host_free_time"] = to_dict(stats.host_free_time);
  return result;
}

// Wraps a Python function so that any thread can call and destroy it.
OutOfMemoryObserver python_observer(py::function function) {
  auto* kept = function.release().ptr(); // never released: observers cannot be detached
  return [kept](c10::DeviceIndex index, size_t wanted, size_t limit, size_t free_bytes) {
    py::gil_scoped_acquire gil;
    py::reinterpret_borrow<py::function>(kept)(static_cast<int>(index), wanted, limit, free_bytes);
  };
}

void attach_observer(py::function function) {
  auto observer = python_observer(std::move(function));
  py::gil_scoped_release no_gil;
  for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
    device_allocator(index).attach_out_of_memory_observer(observer);
  }
}

void* to_pointer(uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

uintptr_t allocate(size_t bytes, c10::DeviceIndex index, c10::StreamId stream) {
  index = checked_index(index);
  c10::Stream on(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, index), stream);
  return reinterpret_cast<uintptr_t>(raw_allocate(on, bytes));
}

void record_stream(uintptr_t address, c10::DeviceIndex index, c10::StreamId stream) {
  Segment* segment = segment_map().find(to_pointer(address));
  TORCH_CHECK(segment != nullptr, "invalid device pointer: ", to_pointer(address));
  c10::Stream on(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, index), stream);
  stream_identity(on); // throws for a stream that does not exist
  segment->allocator.load()->record_stream(segment, to_pointer(address), on);
}

std::pair<uintptr_t, size_t> base_allocation(uintptr_t address) {
  Segment* segment = segment_map().find(to_pointer(address));
  TORCH_CHECK(segment != nullptr, "invalid device pointer: ", to_pointer(address));
  auto [base, bytes] = segment->allocator.load()->base_allocation(segment, to_pointer(address));
  return {reinterpret_cast<uintptr_t>(base), bytes};
}

void begin_allocate_current_thread(c10::DeviceIndex index, c10::MempoolId_t id) {
  device_allocator(index).begin_allocate_to_pool(
      id, [thread = std::this_thread::get_id()](c10::StreamId) { return std::this_thread::get_id() == thread; });
}

MemorySource source_at(uintptr_t allocate, uintptr_t free) {
  return {
      reinterpret_cast<decltype(MemorySource::allocate)>(allocate),
      reinterpret_cast<decltype(MemorySource::free)>(free)};
}

// Blocks a stream until the gate is opened or destroyed, so that tests control when pending commands complete.
class StreamGate {
 public:
  StreamGate(c10::DeviceIndex index, c10::StreamId id)
      : stream_(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, checked_index(index)), id) {
    const auto wait = [opened = opened_.get_future().share()](char* const*, const uint64_t*) { opened.wait(); };
    device(index).submit(HostCallback{make_host_function("gate", wait)}, stream_handle(stream_));
  }

  ~StreamGate() {
    open();
  }

  // Opens the gate and waits until the stream has completed.
  void open() {
    if (!open_) {
      open_ = true;
      opened_.set_value();
      synchronize_stream(stream_);
    }
  }

 private:
  c10::Stream stream_;
  std::promise<void> opened_;
  bool open_ = false;
};

} // namespace

void bind_allocator(py::module_& module) {
  auto plain = [&](const char* name, auto function, auto&&... extra) {
    module.def(name, torch::wrap_pybind_function(function), std::forward<decltype(extra)>(extra)...);
  };
  // Releases the GIL: these functions may wait for the allocator's lock or call the device.
  auto released = [&](const char* name, auto function, auto&&... extra) {
    module.def(name, torch::wrap_pybind_function_no_gil(function), std::forward<decltype(extra)>(extra)...);
  };

  released("_memory_allocate", &allocate, py::arg("bytes"), py::arg("device"), py::arg("stream"));
  released("_memory_free", [](uintptr_t address) { raw_free(to_pointer(address)); });
  released("_memory_record_stream", &record_stream);
  released("_memory_base_allocation", &base_allocation);
  released("_memory_device_of_address", [](uintptr_t address) { return device_of_address(to_pointer(address)); });
  plain("_memory_enable_caching", &enable_caching);
  plain("_memory_is_caching_enabled", &is_caching_enabled);

  released("_memory_empty_cache", [](c10::MempoolId_t pool) { caching_allocator().emptyCache(pool); });
  released("_memory_info", [](c10::DeviceIndex index) { return caching_allocator().getMemoryInfo(index); });
  released("_memory_set_fraction", [](double fraction, c10::DeviceIndex index) {
    device_allocator(index).set_memory_fraction(fraction);
  });
  released("_memory_get_fraction", [](c10::DeviceIndex index) { return device_allocator(index).memory_fraction(); });
  released("_memory_set_settings", [](const std::string& settings) { set_allocator_settings(settings); });

  plain("_memory_stats", &stats);
  released("_memory_reset_accumulated_stats", [](c10::DeviceIndex index) {
    caching_allocator().resetAccumulatedStats(index);
  });
  released("_memory_reset_peak_stats", [](c10::DeviceIndex index) { caching_allocator().resetPeakStats(index); });
  plain("_memory_host_stats", &host_stats);
  released("_memory_reset_accumulated_host_stats", [] { pinned_allocator().reset_accumulated_stats(); });
  released("_memory_reset_peak_host_stats", [] { pinned_allocator().reset_peak_stats(); });

  plain("_memory_snapshot", &memory_snapshot, py::arg("pool"), py::arg("include_traces"));
  plain(
      "_memory_record_history", &start_memory_history, py::arg("enabled"), py::arg("context"), py::arg("stacks"),
      py::arg("max_entries"), py::arg("clear_history"), py::arg("skip_actions"));
  released(
      "_memory_is_history_enabled", [](c10::DeviceIndex index) { return device_allocator(index).history_enabled(); });
  plain("_memory_allocation_traceback", &allocation_traceback);
  released("_memory_set_metadata", [](const std::string& metadata) { set_memory_metadata(metadata); });
  released("_memory_get_metadata", [] { return memory_metadata(); });
  plain("_memory_attach_out_of_memory_observer", &attach_observer);

  py::class_<StreamGate>(module, "_StreamGate")
      .def(py::init<c10::DeviceIndex, c10::StreamId>(), py::arg("device"), py::arg("stream"))
      .def("open", &StreamGate::open, py::call_guard<py::gil_scoped_release>());

  released("_memory_new_pool_id", &new_pool_id);
  released("_memory_retain_pool", [](c10::DeviceIndex index, c10::MempoolId_t id) {
    device_allocator(index).create_or_retain_pool(id);
  });
  released("_memory_release_pool", [](c10::DeviceIndex index, c10::MempoolId_t id) {
    device_allocator(index).release_pool(id);
  });
  released("_memory_set_pool_options", [](c10::DeviceIndex index, c10::MempoolId_t id, bool use_on_oom, bool no_split) {
    device_allocator(index).set_pool_options(id, use_on_oom, no_split);
  });
  released(
      "_memory_set_pool_source", [](c10::DeviceIndex index, c10::MempoolId_t id, uintptr_t allocate, uintptr_t free) {
        device_allocator(index).set_pool_source(id, source_at(allocate, free));
      });
  released("_memory_set_source", [](uintptr_t allocate, uintptr_t free) {
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      device_allocator(index).check_may_set_source();
    }
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      device_allocator(index).set_source(source_at(allocate, free));
    }
  });
  released("_memory_pool_use_count", [](c10::DeviceIndex index, c10::MempoolId_t id) {
    return device_allocator(index).pool_use_count(id);
  });
  released("_memory_begin_allocate_to_pool", [](c10::DeviceIndex index, c10::MempoolId_t id) {
    device_allocator(index).begin_allocate_to_pool(id, [](c10::StreamId) { return true; });
  });
  released("_memory_begin_allocate_current_thread_to_pool", &begin_allocate_current_thread);
  released("_memory_end_allocate_to_pool", [](c10::DeviceIndex index, c10::MempoolId_t id) {
    device_allocator(index).end_allocate_to_pool(id);
  });
}

} // namespace backplane
