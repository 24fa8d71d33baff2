#include "drivers/cuda/cudnn_graph.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "drivers/cuda/cudnn.h"
#include "drivers/cuda/handle_pool.h"

namespace backplane::cuda {
namespace dnn {

CudnnApi cudnn;

namespace {

constexpr std::array<int, 2> kHeuristicsModes{3, 2}; // CUDNN_HEUR_MODE_A, and what works for more calls

// The configurations of engines for a graph, from the one that cuDNN expects to be the fastest on.
std::vector<Descriptor> configs_of(const Descriptor& graph, int mode) {
  Descriptor heuristics(kHeuristics);
  heuristics.set(kHeuristicsGraph, graph);
  heuristics.set(kHeuristicsModeOf, kHeuristicsMode, mode);
  heuristics.finalize();
  const int64_t count = heuristics.get(kHeuristicsResults, kDescriptor, 0, nullptr);
  std::vector<Descriptor> configs;
  std::vector<void*> pointers;
  for (int64_t i = 0; i < count; ++i) {
    configs.emplace_back(kEngineConfig);
    pointers.push_back(configs.back().get());
  }
  const int64_t found = heuristics.get(kHeuristicsResults, kDescriptor, count, pointers.data());
  while (static_cast<int64_t>(configs.size()) > found) {
    configs.pop_back();
  }
  return configs;
}

const Routines& routines_of(const std::string& family) {
  for (const Routines* one :
       {&convolution::routines(), &attention::forward_routines(), &attention::backward_routines()}) {
    if (one->family == family) {
      return *one;
    }
  }
  TORCH_CHECK_VALUE(false, "cuDNN has no routines of the family ", family);
}

} // namespace

void check(int status) {
  if (status != 0) {
    throw Failure{status};
  }
}

Descriptor tensor(
    int64_t id, Number type, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, Place place) {
  Descriptor made(kTensor);
  made.set(kTensorDataType, kDataTypeType, type);
  made.set(kTensorDimensions, sizes);
  made.set(kTensorStrides, strides);
  made.set(kTensorId, kInt64, id);
  made.set(kTensorAlignment, kInt64, kAlignment);
  if (place != Place::Device) {
    made.set(place == Place::Host ? kTensorIsByValue : kTensorIsVirtual, kBoolean, true);
  }
  made.finalize();
  return made;
}

Descriptor operation_graph(void* handle, c10::ArrayRef<void*> operations) {
  Descriptor graph(kOperationGraph);
  graph.set(kGraphHandle, kHandleType, handle);
  graph.set(kGraphOperations, kDescriptor, static_cast<int64_t>(operations.size()), operations.data());
  graph.finalize();
  return graph;
}

Notes::Notes(const Descriptor& config) {
  Descriptor engine(kEngine);
  void* pointer = engine.get();
  static_cast<void>(config.get(kConfigEngine, kDescriptor, 1, &pointer));
  const auto room = static_cast<int64_t>(notes_.size());
  count_ = std::min(engine.get(kEngineNotes, kNumericalNote, room, notes_.data()), room);
}

bool Notes::has(Note note) const {
  return std::find(notes_.begin(), notes_.begin() + count_, note) != notes_.begin() + count_;
}

int Plan::build(
    void* handle, c10::function_ref<std::vector<Descriptor>()> graph, c10::function_ref<bool(const Notes&)> accepts) {
  if (is_built_) {
    return 0;
  }
  const OutsideCapture allocates;
  used_.clear();
  try {
    used_ = graph();
  } catch (const Failure& failure) {
    return failure.status;
  }
  int status = kNotSupported;
  for (const int mode : kHeuristicsModes) {
    try {
      for (Descriptor& config : configs_of(used_.back(), mode)) {
        if (accepts(Notes(config)) && (status = finalize(handle, config)) == 0) {
          used_.push_back(std::move(config));
          is_built_ = true;
          return 0;
        }
      }
    } catch (const Failure& failure) {
      status = failure.status;
    }
  }
  return status;
}

int Plan::run(void* handle, c10::ArrayRef<int64_t> ids, c10::ArrayRef<void*> memory, void* workspace) const {
  try {
    Descriptor pack(kVariantPack);
    pack.set(kPackIds, kInt64, static_cast<int64_t>(ids.size()), ids.data());
    pack.set(kPackPointers, kPointer, static_cast<int64_t>(memory.size()), memory.data());
    pack.set(kPackWorkspace, kPointer, workspace);
    pack.finalize();
    check(cudnn.cudnnBackendExecute(handle, plan_->get(), pack.get()));
  } catch (const Failure& failure) {
    return failure.status;
  }
  return 0;
}

int Plan::finalize(void* handle, const Descriptor& config) {
  try {
    Descriptor plan(kExecutionPlan);
    plan.set(kPlanHandle, kHandleType, handle);
    plan.set(kPlanConfig, config);
    plan.finalize();
    static_cast<void>(plan.get(kPlanWorkspace, kInt64, 1, &workspace_));
    plan_.emplace(std::move(plan));
  } catch (const Failure& failure) {
    return failure.status;
  }
  return 0;
}

int with_handle(size_t index, c10::function_ref<int(void* handle)> use) {
  static auto& handles = *new HandlePools<void*>; // never destroyed: cuDNN can be unloaded before
  return call_in_context(index, [&] {
    const auto make = [](void** handle) { return cudnn.cudnnCreate(handle); };
    return handles.at(index).with(make, use);
  });
}

} // namespace dnn

std::vector<std::string> cudnn_functions() {
#define BACKPLANE_CUDNN_NAME(name, parameters) #name,
  return {BACKPLANE_CUDNN_FUNCTIONS(BACKPLANE_CUDNN_NAME)};
#undef BACKPLANE_CUDNN_NAME
}

std::map<std::string, uintptr_t> cudnn_routines(
    const std::map<std::string, uintptr_t>& functions, const std::string& family, size_t index) {
#define BACKPLANE_CUDNN_LOAD(name, parameters) \
  dnn::cudnn.name = reinterpret_cast<decltype(dnn::cudnn.name)>(function_of(functions, "cuDNN", #name));
  BACKPLANE_CUDNN_FUNCTIONS(BACKPLANE_CUDNN_LOAD)
#undef BACKPLANE_CUDNN_LOAD
  const dnn::Routines& routines = dnn::routines_of(family);
  std::map<std::string, uintptr_t> found;
  for (size_t type = 0; type < routines.types.size(); ++type) {
    found[routines.types[type].name] =
        reinterpret_cast<uintptr_t>(routines.functions.at(index * routines.types.size() + type));
  }
  return found;
}

std::pair<int, size_t> cudnn_workspace(
    size_t index, const std::string& family, const std::string& dtype, const std::vector<int64_t>& integers) {
  const dnn::Routines& routines = dnn::routines_of(family);
  const auto type = std::find_if(
      routines.types.begin(), routines.types.end(), [&dtype](const auto& one) { return one.name == dtype; });
  TORCH_CHECK_VALUE(
      type != routines.types.end() && integers.size() == routines.integers, "cuDNN has no ", family, " in ", dtype,
      " with ", integers.size(), " integers");
  return routines.workspace(index, static_cast<size_t>(type - routines.types.begin()), integers);
}

} // namespace backplane::cuda
