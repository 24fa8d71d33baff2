// Memory snapshots and history as the Python objects that torch.cuda._memory_viz and pytorch.org/memory_viz read.
#pragma once

#include "memory/memory_history.h"

#include <pybind11/pybind11.h>

#include <optional>

namespace backplane {

// {"segments": …, "device_traces": …, "allocator_settings": …, "external_annotations": …}; see
// torch.cuda.memory._snapshot.
pybind11::dict memory_snapshot(c10::MempoolId_t pool, bool include_traces);

// Takes the arguments of torch.cuda.memory._record_memory_history. Throws ValueError for unknown values.
void start_memory_history(
    std::optional<std::string> enabled,
    std::optional<std::string> context,
    const std::string& stacks,
    size_t max_entries,
    bool clear_history,
    const std::vector<std::string>& skip_actions);

// The frames of the allocation that starts at this address, or None if they were not recorded.
pybind11::object allocation_traceback(uintptr_t address);

// Sets a text that is attached to all later entries of the history.
void set_memory_metadata(const std::string& metadata);
std::string memory_metadata();

} // namespace backplane
