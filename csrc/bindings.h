// Functions that register the parts of torch_backplane._C, one for each file of bindings.
#pragma once

#include <pybind11/pybind11.h>

namespace backplane {

void bind_device(pybind11::module_& module);
void bind_drivers(pybind11::module_& module);
void bind_allocator(pybind11::module_& module);
void bind_allocator_replay(pybind11::module_& module);
void bind_copies(pybind11::module_& module);
void bind_plans(pybind11::module_& module);
void bind_plan_builder(pybind11::module_& module);
void bind_host_work(pybind11::module_& module);
void bind_queue_functions(pybind11::module_& module);
void bind_geometry(pybind11::module_& module);
void bind_graphs(pybind11::module_& module);
void bind_interprocess(pybind11::module_& module);
void bind_planner_metas(pybind11::module_& module);
void bind_sync_watch(pybind11::module_& module);
void bind_distributed(pybind11::module_& module);
void bind_cuda_names(pybind11::module_& module);

} // namespace backplane
