#include "drivers/cuda/cudnn.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <optional>

#include "drivers/cuda/cuda_calls.h"
#include "drivers/cuda/cuda_launcher.h"
#include "drivers/cuda/handle_pool.h"
#include "drivers/lru_cache.h"

namespace backplane::cuda {
namespace dnn {
namespace {

// clang-format off
#define BACKPLANE_CUDNN_FUNCTIONS(FUNCTION) \
  FUNCTION(cudnnCreate, (void** handle)) \
  FUNCTION(cudnnSetStream, (void* handle, void* stream)) \
  FUNCTION(cudnnBackendCreateDescriptor, (int kind, void** descriptor)) \
  FUNCTION(cudnnBackendDestroyDescriptor, (void* descriptor)) \
  FUNCTION(cudnnBackendFinalize, (void* descriptor)) \
  FUNCTION(cudnnBackendSetAttribute, ( \
    void* descriptor, int attribute, int type, int64_t count, const void* values)) \
  FUNCTION(cudnnBackendGetAttribute, ( \
    void* descriptor, int attribute, int type, int64_t room, int64_t* count, void* values)) \
  FUNCTION(cudnnBackendExecute, (void* handle, void* plan, void* variant_pack))
// clang-format on

struct CudnnApi {
#define BACKPLANE_CUDNN_MEMBER(name, parameters) int(*name) parameters = nullptr;
  BACKPLANE_CUDNN_FUNCTIONS(BACKPLANE_CUDNN_MEMBER)
#undef BACKPLANE_CUDNN_MEMBER
};
CudnnApi cudnn;

// From cudnn_graph.h, whose enums are ints.
enum Status : int { kSizeInsufficient = 2006, kNotSupported = 3000 }; // cudnnStatus_t
enum Kind : int { // cudnnBackendDescriptorType_t
  kConvolution = 1,
  kEngine = 2,
  kEngineConfig = 3,
  kHeuristics = 4,
  kExecutionPlan = 5,
  kForwardOperation = 10,
  kFilterOperation = 11,
  kDataOperation = 12,
  kOperationGraph = 15,
  kVariantPack = 16,
  kTensor = 17,
};
enum Type : int { // cudnnBackendAttributeType_t
  kHandleType = 0,
  kDataTypeType = 1,
  kInt64 = 3,
  kFloat = 4,
  kDouble = 5,
  kPointer = 6,
  kConvolutionMode = 7,
  kHeuristicsMode = 8,
  kNumericalNote = 11,
  kDescriptor = 15,
};
enum Attribute : int { // cudnnBackendAttributeName_t
  kConvolutionCompute = 100,
  kConvolutionModeOf = 101,
  kConvolutionDilations = 102,
  kConvolutionStrides = 103,
  kConvolutionPaddingAfter = 104,
  kConvolutionPaddingBefore = 105,
  kConvolutionDimensions = 106,
  kHeuristicsModeOf = 200,
  kHeuristicsGraph = 201,
  kHeuristicsResults = 202,
  kConfigEngine = 300,
  kPlanHandle = 400,
  kPlanConfig = 401,
  kPlanWorkspace = 402,
  kGraphHandle = 800,
  kGraphOperations = 801,
  kTensorAlignment = 900,
  kTensorDataType = 901,
  kTensorDimensions = 902,
  kTensorStrides = 903,
  kTensorId = 906,
  kPackIds = 1000,
  kPackPointers = 1001,
  kPackWorkspace = 1003,
  kEngineNotes = 1303,
};
constexpr int kFloatNumbers = 0, kDoubleNumbers = 1; // cudnnDataType_t
constexpr int kCrossCorrelation = 1; // cudnnConvolutionMode_t
constexpr std::array<int, 2> kHeuristicsModes{3, 2}; // CUDNN_HEUR_MODE_A, and what works for more calls
constexpr int kAllNotes = 10; // CUDNN_NUMERICAL_NOTE_TYPE_COUNT
enum Note : int { kTensorCore = 0, kConvertsInputs = 1, kNondeterministic = 3 }; // cudnnBackendNumericalNote_t

constexpr int64_t kAlignment = 16; // bytes, of all tensors: docs/driver-contract.md
constexpr size_t kMaxPlans = 1024; // of a device

struct NumberType {
  const char* name; // PyTorch's
  int type, compute; // cudnnDataType_t
};
constexpr std::array<NumberType, 4> kNumberTypes{
    {{"float32", 0, 0}, {"float64", 1, 1}, {"float16", 2, 0}, {"bfloat16", 9, 0}}};

// The integers of the family convolution (docs/driver-contract.md). The arrays have 3 spatial dimensions.
enum Integer : size_t {
  kPass,
  kChannelsLast,
  kGroups,
  kBatch,
  kImageChannels,
  kChannels,
  kImage,
  kWindow = kImage + 3,
  kStride = kWindow + 3,
  kPadding = kStride + 3,
  kDilation = kPadding + 3,
  kAllowed = kDilation + 3,
  kIntegers,
};
constexpr int64_t kTf32 = 1; // of kAllowed
enum Pass : int64_t { kForward = 0, kOfImage = 1, kOfWeight = 2 };

// The key of a plan.
struct Shape {
  size_t type; // in kNumberTypes
  std::array<int64_t, kIntegers> integers;
  auto operator<=>(const Shape&) const = default;
};

// A status other than 0.
struct Failure {
  int status;
};

void check(int status) {
  if (status != 0) {
    throw Failure{status};
  }
}

// Owns a descriptor. All members throw Failure.
class Descriptor {
 public:
  explicit Descriptor(Kind kind) {
    check(cudnn.cudnnBackendCreateDescriptor(kind, &descriptor_));
  }
  Descriptor(Descriptor&& other) noexcept : descriptor_(std::exchange(other.descriptor_, nullptr)) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (descriptor_ != nullptr) {
      static_cast<void>(cudnn.cudnnBackendDestroyDescriptor(descriptor_));
    }
  }

  template <typename Value>
  void set(Attribute attribute, Type type, const Value& value) {
    set(attribute, type, 1, &value);
  }
  void set(Attribute attribute, Type type, int64_t count, const void* values) {
    check(cudnn.cudnnBackendSetAttribute(descriptor_, attribute, type, count, values));
  }
  void set(Attribute attribute, const std::vector<int64_t>& values) {
    set(attribute, kInt64, static_cast<int64_t>(values.size()), values.data());
  }
  void set(Attribute attribute, const Descriptor& value) {
    set(attribute, kDescriptor, value.descriptor_);
  }
  // Stores up to `room` values. Returns how many there are.
  int64_t get(Attribute attribute, Type type, int64_t room, void* values) const {
    int64_t count = 0;
    check(cudnn.cudnnBackendGetAttribute(descriptor_, attribute, type, room, &count, values));
    return count;
  }
  void finalize() {
    check(cudnn.cudnnBackendFinalize(descriptor_));
  }
  void* get() const {
    return descriptor_;
  }

 private:
  void* descriptor_ = nullptr;
};

// The contiguous strides of a tensor, whose dimension 1 is the innermost one if `channels_last`.
std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes, bool channels_last) {
  std::vector<int64_t> strides(sizes.size(), 1);
  int64_t step = channels_last ? sizes[1] : 1;
  for (size_t d = sizes.size() - 1; d > 1; step *= sizes[d--]) {
    strides[d] = step;
  }
  if (!channels_last) {
    strides[1] = step;
    step *= sizes[1];
  }
  strides[0] = step;
  return strides;
}

Descriptor tensor_of(int64_t id, const NumberType& type, const std::vector<int64_t>& sizes, bool channels_last) {
  Descriptor tensor(kTensor);
  tensor.set(kTensorDataType, kDataTypeType, type.type);
  tensor.set(kTensorDimensions, sizes);
  tensor.set(kTensorStrides, strides_of(sizes, channels_last));
  tensor.set(kTensorId, kInt64, id);
  tensor.set(kTensorAlignment, kInt64, kAlignment);
  tensor.finalize();
  return tensor;
}

// The numbers of a convolution along its spatial dimensions: two, or three if the first one is not trivial.
struct Spatial {
  explicit Spatial(const std::array<int64_t, kIntegers>& all)
      : first(all[kImage] == 1 && all[kWindow] == 1 && all[kPadding] == 0 ? 1 : 0) {
    for (size_t d = first; d < 3; ++d) {
      image.push_back(all[kImage + d]);
      window.push_back(all[kWindow + d]);
      stride.push_back(all[kStride + d]);
      padding.push_back(all[kPadding + d]);
      dilation.push_back(all[kDilation + d]);
      const int64_t reach = (window.back() - 1) * dilation.back() + 1;
      places.push_back((image.back() + 2 * padding.back() - reach) / stride.back() + 1);
    }
  }

  size_t first;
  std::vector<int64_t> image, window, stride, padding, dilation, places;
};

std::vector<int64_t> joined(int64_t first, int64_t second, std::vector<int64_t> rest) {
  rest.insert(rest.begin(), {first, second});
  return rest;
}

// The operation's attributes: alpha, beta, the convolution, the weight, the image and the values. The descriptors of
// tensors have the numbers of the family's memory arguments: 0 is the result.
struct Operation {
  Kind kind;
  std::array<int, 6> attributes;
  int64_t weight, image, values;
};
constexpr std::array<Operation, 3> kOperations{{
    {kForwardOperation, {700, 701, 702, 703, 704, 705}, 2, 1, 0},
    {kDataOperation, {706, 707, 708, 709, 710, 711}, 2, 0, 1},
    {kFilterOperation, {712, 713, 714, 715, 716, 717}, 0, 2, 1},
}};

// Returns the descriptors of a graph of one operation. The last one is the graph, which uses the others.
std::vector<Descriptor> graph_of(void* handle, const Shape& shape) {
  const auto& all = shape.integers;
  const NumberType& type = kNumberTypes.at(shape.type);
  const Spatial spatial(all);
  Descriptor convolution(kConvolution);
  convolution.set(kConvolutionCompute, kDataTypeType, type.compute);
  convolution.set(kConvolutionModeOf, kConvolutionMode, kCrossCorrelation);
  convolution.set(kConvolutionDimensions, kInt64, static_cast<int64_t>(spatial.image.size()));
  convolution.set(kConvolutionDilations, spatial.dilation);
  convolution.set(kConvolutionStrides, spatial.stride);
  convolution.set(kConvolutionPaddingBefore, spatial.padding);
  convolution.set(kConvolutionPaddingAfter, spatial.padding);
  convolution.finalize();

  const Operation& named = kOperations.at(static_cast<size_t>(all[kPass]));
  const bool channels_last = all[kChannelsLast] != 0;
  const int64_t of_group = all[kImageChannels] / all[kGroups];
  Descriptor weight = tensor_of(named.weight, type, joined(all[kChannels], of_group, spatial.window), channels_last);
  Descriptor image =
      tensor_of(named.image, type, joined(all[kBatch], all[kImageChannels], spatial.image), channels_last);
  Descriptor values = tensor_of(named.values, type, joined(all[kBatch], all[kChannels], spatial.places), channels_last);
  const auto attribute = [&named](size_t at) { return static_cast<Attribute>(named.attributes.at(at)); };
  Descriptor operation(named.kind);
  if (type.compute == kDoubleNumbers) {
    operation.set(attribute(0), kDouble, 1.0);
    operation.set(attribute(1), kDouble, 0.0);
  } else {
    operation.set(attribute(0), kFloat, 1.0F);
    operation.set(attribute(1), kFloat, 0.0F);
  }
  operation.set(attribute(2), convolution);
  operation.set(attribute(3), weight);
  operation.set(attribute(4), image);
  operation.set(attribute(5), values);
  operation.finalize();

  Descriptor graph(kOperationGraph);
  graph.set(kGraphHandle, kHandleType, handle);
  graph.set(kGraphOperations, operation);
  graph.finalize();
  std::vector<Descriptor> made;
  for (Descriptor* one : {&convolution, &weight, &image, &values, &operation, &graph}) {
    made.push_back(std::move(*one));
  }
  return made;
}

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

// Whether an engine computes with the precision of the dtype, or one that is allowed, and in a fixed order.
bool is_acceptable(const Descriptor& config, const Shape& shape) {
  Descriptor engine(kEngine);
  void* pointer = engine.get();
  static_cast<void>(config.get(kConfigEngine, kDescriptor, 1, &pointer));
  std::array<int, kAllNotes> notes{};
  const int64_t count = engine.get(kEngineNotes, kNumericalNote, kAllNotes, notes.data());
  const auto end = notes.begin() + std::min<int64_t>(count, kAllNotes);
  const auto has = [&notes, end](Note note) { return std::find(notes.begin(), end, note) != end; };
  const bool is_float = kNumberTypes.at(shape.type).type == kFloatNumbers; // tensor cores compute it in TF32
  const bool can_use_tensor_cores = !is_float || (shape.integers[kAllowed] & kTf32) != 0;
  return !has(kConvertsInputs) && !has(kNondeterministic) && (can_use_tensor_cores || !has(kTensorCore));
}

// An execution plan. It must be used by one thread at a time.
class Plan {
 public:
  // Takes the first engine that works. Returns the last status if there is none.
  int build(void* handle, const Shape& shape) {
    if (is_built_) {
      return 0;
    }
    const OutsideCapture allocates;
    used_.clear();
    try {
      used_ = graph_of(handle, shape);
    } catch (const Failure& failure) {
      return failure.status;
    }
    int status = kNotSupported;
    for (const int mode : kHeuristicsModes) {
      try {
        for (Descriptor& config : configs_of(used_.back(), mode)) {
          if (is_acceptable(config, shape) && (status = finalize(handle, config)) == 0) {
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

  int64_t workspace() const {
    return workspace_;
  }

  int run(void* handle, std::array<void*, 3> memory, void* workspace) const {
    constexpr std::array<int64_t, 3> ids{0, 1, 2};
    try {
      Descriptor pack(kVariantPack);
      pack.set(kPackIds, kInt64, ids.size(), ids.data());
      pack.set(kPackPointers, kPointer, memory.size(), memory.data());
      pack.set(kPackWorkspace, kPointer, workspace);
      pack.finalize();
      check(cudnn.cudnnBackendExecute(handle, plan_->get(), pack.get()));
    } catch (const Failure& failure) {
      return failure.status;
    }
    return 0;
  }

  std::mutex mutex;

 private:
  int finalize(void* handle, const Descriptor& config) {
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

  bool is_built_ = false;
  std::vector<Descriptor> used_; // by the plan
  std::optional<Descriptor> plan_;
  int64_t workspace_ = 0; // bytes
};

// Calls `use` with a handle and the built plan, while the device's context is current.
int with_plan(size_t index, const Shape& shape, c10::function_ref<int(void* handle, const Plan&)> use) {
  static auto& handles = *new HandlePools<void*>; // never destroyed: cuDNN can be unloaded before
  static auto& caches = *[] {
    auto* const made = new std::vector<std::unique_ptr<LruCache<Shape, Plan>>>;
    for (size_t i = 0; i < kMostDevices; ++i) {
      made->push_back(std::make_unique<LruCache<Shape, Plan>>(kMaxPlans));
    }
    return made;
  }();
  return call_in_context(index, [&] {
    const auto make = [](void** handle) { return cudnn.cudnnCreate(handle); };
    return handles.at(index).with(make, [&](void* handle) {
      const auto plan = caches.at(index)->get(shape, [] { return std::make_shared<Plan>(); });
      const std::lock_guard<std::mutex> guard(plan->mutex);
      const int status = plan->build(handle, shape);
      return status != 0 ? status : use(handle, *plan);
    });
  });
}

// The arguments of the family convolution, with a workspace.
int convolve(size_t index, size_t type, void* queue, const CArgument* arguments) {
  Shape shape{type, {}};
  for (size_t i = 0; i < kIntegers; ++i) {
    shape.integers.at(i) = *static_cast<const int64_t*>(arguments[3 + i].data);
  }
  const CArgument* const given = arguments + 3 + kIntegers; // the workspace
  return with_plan(index, shape, [&](void* handle, const Plan& plan) {
    if (*static_cast<const int64_t*>(given[1].data) < plan.workspace()) {
      return static_cast<int>(kSizeInsufficient);
    }
    const int status = cudnn.cudnnSetStream(handle, queue);
    return status != 0
        ? status
        : plan.run(handle, {arguments[0].memory, arguments[1].memory, arguments[2].memory}, given[0].memory);
  });
}

// A routine has no argument for the device and the dtype, so each pair has a separate function.
template <size_t index, size_t type>
int routine(void* queue, const CArgument* arguments, uint64_t) {
  return convolve(index, type, queue, arguments);
}

template <size_t... pairs>
constexpr std::array<LibraryRoutine, sizeof...(pairs)> all_routines(std::index_sequence<pairs...>) {
  return {&routine<pairs / kNumberTypes.size(), pairs % kNumberTypes.size()>...};
}
constexpr auto kRoutines = all_routines(std::make_index_sequence<kMostDevices * kNumberTypes.size()>());

} // namespace
} // namespace dnn

std::vector<std::string> cudnn_functions() {
#define BACKPLANE_CUDNN_NAME(name, parameters) #name,
  return {BACKPLANE_CUDNN_FUNCTIONS(BACKPLANE_CUDNN_NAME)};
#undef BACKPLANE_CUDNN_NAME
}

std::map<std::string, uintptr_t> cudnn_convolutions(const std::map<std::string, uintptr_t>& functions, size_t index) {
#define BACKPLANE_CUDNN_LOAD(name, parameters) \
  dnn::cudnn.name = reinterpret_cast<decltype(dnn::cudnn.name)>(function_of(functions, "cuDNN", #name));
  BACKPLANE_CUDNN_FUNCTIONS(BACKPLANE_CUDNN_LOAD)
#undef BACKPLANE_CUDNN_LOAD
  std::map<std::string, uintptr_t> found;
  for (size_t type = 0; type < dnn::kNumberTypes.size(); ++type) {
    found[dnn::kNumberTypes[type].name] =
        reinterpret_cast<uintptr_t>(dnn::kRoutines.at(index * dnn::kNumberTypes.size() + type));
  }
  return found;
}

std::pair<int, size_t> cudnn_workspace(size_t index, const std::string& dtype, const std::vector<int64_t>& integers) {
  const auto type = std::find_if(
      dnn::kNumberTypes.begin(), dnn::kNumberTypes.end(), [&dtype](const auto& one) { return one.name == dtype; });
  TORCH_CHECK_VALUE(
      type != dnn::kNumberTypes.end() && integers.size() == dnn::kIntegers, "cuDNN has no convolution in ", dtype,
      " with ", integers.size(), " integers");
  dnn::Shape shape{static_cast<size_t>(type - dnn::kNumberTypes.begin()), {}};
  std::copy(integers.begin(), integers.end(), shape.integers.begin());
  size_t bytes = 0;
  const int status = dnn::with_plan(index, shape, [&bytes](void*, const dnn::Plan& plan) {
    bytes = static_cast<size_t>(plan.workspace());
    return 0;
  });
  return {status, bytes};
}

} // namespace backplane::cuda
