#include "memory/memory_snapshot.h"

#include "memory/allocator.h"
#include "memory/allocator_config.h"
#include "memory/caching_allocator.h"
#include "memory/segment_map.h"

#include <c10/util/ApproximateClock.h>
#include <pybind11/stl.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <unordered_map>

namespace py = pybind11;

// Declared in torch/csrc/profiler/python/combined_traceback.h, which needs a JSON library that PyTorch does not ship.
namespace torch {
TORCH_API std::vector<pybind11::object> py_symbolize(std::vector<CapturedTraceback*>& to_symbolize);
void installCapturedTracebackPython();
} // namespace torch

namespace backplane {

namespace {

// Collects the stacks of many dicts, and fills in their "frames" together, so that equal stacks are symbolized once.
class FrameCollector {
 public:
  void add(py::dict target, const Context& context) {
    if (context == nullptr) {
      target["frames"] = py::list();
      return;
    }
    auto* traceback = torch::getCapturedTracebackFromContext(context);
    auto [entry, fresh] = index_.emplace(traceback, tracebacks_.size());
    if (fresh) {
      tracebacks_.push_back(traceback);
      kept_.push_back(context);
    }
    targets_.emplace_back(std::move(target), entry->second);
  }

  void fill_in() {
    std::vector<py::object> frames = torch::py_symbolize(tracebacks_);
    for (auto& [target, index] : targets_) {
      target["frames"] = frames.at(index);
    }
  }

 private:
  std::unordered_map<torch::CapturedTraceback*, size_t> index_;
  std::vector<torch::CapturedTraceback*> tracebacks_;
  std::vector<Context> kept_;
  std::vector<std::pair<py::dict, size_t>> targets_;
};

py::tuple to_tuple(c10::MempoolId_t id) {
  return py::make_tuple(id.first, id.second);
}

py::dict to_dict(const SegmentInfo& segment, c10::DeviceIndex device, FrameCollector& frames) {
  py::dict result;
  result["device"] = static_cast<int>(device);
  result["address"] = segment.address;
  result["total_size"] = segment.total_size;
  result["allocated_size"] = segment.allocated_size;
  result["active_size"] = segment.active_size;
  result["requested_size"] = segment.requested_size;
  result["stream"] = segment.stream;
  result["segment_type"] = segment.large ? "large" : "small";
  result["segment_pool_id"] = to_tuple(segment.pool);
  result["is_expandable"] = segment.expandable;
  frames.add(result, segment.context);
  py::list blocks;
  for (const BlockInfo& block : segment.blocks) {
    py::dict info;
    info["address"] = block.address;
    info["size"] = block.size;
    info["requested_size"] = block.requested;
    info["state"] = block.allocated ? "active_allocated" : block.active ? "active_awaiting_free" : "inactive";
    frames.add(info, block.context);
    blocks.append(info);
  }
  result["blocks"] = blocks;
  return result;
}

c10::ApproximateClockToUnixTimeConverter& clock_converter() {
  static c10::ApproximateClockToUnixTimeConverter converter; // created when history starts
  return converter;
}

template <typename ToNanoseconds>
py::dict to_dict(const TraceEntry& entry, ToNanoseconds& to_ns, FrameCollector& frames) {
  py::dict result;
  result["action"] = name_of(entry.action);
  result[entry.action == TraceAction::OutOfMemory ? "device_free" : "addr"] = entry.address;
  result["size"] = entry.size;
  result["stream"] = entry.stream;
  result["time_us"] = to_ns(entry.time) / 1000;
  result["compile_context"] = "N/A";
  result["user_metadata"] = entry.metadata;
  result["pool_id"] = to_tuple(entry.pool);
  frames.add(result, entry.context);
  return result;
}

py::dict settings_dict() {
  const AllocatorSettings& settings = allocator_settings();
  std::string text = allocator_settings_text();
  py::dict result;
  result["PYTORCH_ALLOC_CONF"] = text;
  result["PYTORCH_CUDA_ALLOC_CONF"] = text; // where PyTorch's viewers look for it
  result["max_split_size"] = static_cast<int64_t>(settings.max_split_size.load());
  result["max_non_split_rounding_size"] = settings.max_non_split_rounding_size.load();
  result["large_segment_size"] = settings.large_segment_size.load();
  result["garbage_collection_threshold"] = settings.garbage_collection_threshold.load();
  result["expandable_segments"] = settings.expandable_segments.load();
  py::dict divisions;
  for (size_t i = 0; i < settings.roundup_power2_divisions.size(); ++i) {
    divisions[py::str(std::to_string(size_t{1} << i))] = settings.roundup_power2_divisions[i].load(); // by MiB
  }
  result["roundup_power2_divisions"] = divisions;
  return result;
}

Context gather_python() {
  return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/true, /*cpp=*/false);
}

Context gather_all() {
  return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/true, /*cpp=*/true);
}

RecordContext record_context(const std::optional<std::string>& word) {
  if (!word.has_value()) {
    return RecordContext::Never;
  }
  TORCH_CHECK_VALUE(
      *word == "state" || *word == "alloc" || *word == "all", "context must be None, 'state', 'alloc' or 'all', not '",
      *word, "'");
  return *word == "state" ? RecordContext::State : *word == "alloc" ? RecordContext::Alloc : RecordContext::All;
}

} // namespace

py::dict memory_snapshot(c10::MempoolId_t pool, bool include_traces) {
  struct DeviceReport {
    c10::DeviceIndex device;
    std::vector<TraceEntry> trace;
    std::vector<SegmentInfo> segments;
  };
  std::vector<DeviceReport> reports;
  {
    py::gil_scoped_release no_gil;
    for_each_device_allocator([&](c10::DeviceIndex index, DeviceCachingAllocator& allocator) {
      auto trace = include_traces ? allocator.trace() : std::vector<TraceEntry>();
      reports.push_back({index, std::move(trace), allocator.snapshot(pool)});
    });
  }
  FrameCollector frames;
  py::list segments;
  py::list traces;
  auto to_ns = clock_converter().makeConverter();
  for (const DeviceReport& report : reports) {
    while (py::len(traces) < static_cast<size_t>(report.device)) {
      traces.append(py::list()); // unused devices
    }
    py::list entries;
    for (const TraceEntry& entry : report.trace) {
      entries.append(to_dict(entry, to_ns, frames));
    }
    traces.append(entries);
    for (const SegmentInfo& segment : report.segments) {
      segments.append(to_dict(segment, report.device, frames));
    }
  }
  frames.fill_in();
  py::dict result;
  result["segments"] = segments;
  result["device_traces"] = traces;
  result["allocator_settings"] = settings_dict();
  result["external_annotations"] = py::list();
  return result;
}

void start_memory_history(
    std::optional<std::string> enabled,
    std::optional<std::string> context,
    const std::string& stacks,
    size_t max_entries,
    bool clear_history,
    const std::vector<std::string>& skip_actions) {
  HistorySettings settings;
  settings.when = record_context(context);
  TORCH_CHECK_VALUE(stacks == "python" || stacks == "all", "stacks must be 'python' or 'all', not '", stacks, "'");
  TORCH_CHECK_VALUE(
      !enabled.has_value() || *enabled == "state" || *enabled == "all", "enabled must be None, 'state' or 'all', not '",
      *enabled, "'");
  settings.enabled = enabled.has_value();
  settings.gather = stacks == "all" ? &gather_all : &gather_python;
  settings.max_entries = max_entries;
  if (enabled == "state") {
    settings.max_entries = 1; // no history, only the stacks of current allocations
    settings.when = std::min(settings.when, RecordContext::State);
  }
  for (const std::string& action : skip_actions) {
    settings.skipped |= uint32_t{1} << static_cast<int>(trace_action(action));
  }
  torch::installCapturedTracebackPython();
  clock_converter();
  py::gil_scoped_release no_gil;
  record_memory_history(settings, clear_history);
}

py::object allocation_traceback(uintptr_t address) {
  auto* pointer = reinterpret_cast<void*>(address);
  Segment* segment = segment_map().find(pointer);
  DeviceCachingAllocator* allocator = segment != nullptr ? segment->allocator.load() : nullptr;
  Context context = allocator != nullptr ? allocator->allocation_context(segment, pointer) : nullptr;
  if (context == nullptr) {
    return py::none();
  }
  std::vector<torch::CapturedTraceback*> tracebacks = {torch::getCapturedTracebackFromContext(context)};
  return torch::py_symbolize(tracebacks).at(0);
}

namespace {
std::mutex metadata_mutex;
std::string metadata_text;
} // namespace

void set_memory_metadata(const std::string& metadata) {
  {
    std::lock_guard<std::mutex> guard(metadata_mutex);
    metadata_text = metadata;
  }
  for_each_device_allocator([&](c10::DeviceIndex, DeviceCachingAllocator& one) { one.set_metadata(metadata); });
}

std::string memory_metadata() {
  std::lock_guard<std::mutex> guard(metadata_mutex);
  return metadata_text;
}

} // namespace backplane
