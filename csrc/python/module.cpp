// torch_backplane._C
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "fallback/fallback.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "Backplane's runtime: what PyTorch accepts only from C++, and the hot path.";
  backplane::register_direct_fallbacks();
  backplane::bind_device(module);
  backplane::bind_drivers(module);
  backplane::bind_allocator(module);
  backplane::bind_allocator_replay(module);
  backplane::bind_copies(module);
  backplane::bind_plans(module);
  backplane::bind_plan_builder(module);
  backplane::bind_host_work(module);
  backplane::bind_queue_functions(module);
  backplane::bind_geometry(module);
  backplane::bind_graphs(module);
  backplane::bind_interprocess(module);
  backplane::bind_planner_metas(module);
  backplane::bind_sync_watch(module);
  backplane::bind_distributed(module);
  backplane::bind_cuda_names(module);
}
