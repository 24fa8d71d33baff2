// cuDNN's graph API, as convolutions and attention use it: descriptors, the choice of an engine, plans and their cache.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "drivers/cuda/cuda_calls.h"
#include "drivers/cuda/cuda_launcher.h"
#include "drivers/lru_cache.h"

namespace backplane::cuda::dnn {

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
extern CudnnApi cudnn;

// From cudnn_graph.h, whose enums are ints.
enum Status : int { kSizeInsufficient = 2006, kNotSupported = 3000 }; // cudnnStatus_t
enum Kind : int { // cudnnBackendDescriptorType_t
  kPointwise = 0,
  kConvolution = 1,
  kEngine = 2,
  kEngineConfig = 3,
  kHeuristics = 4,
  kExecutionPlan = 5,
  kForwardOperation = 10,
  kFilterOperation = 11,
  kDataOperation = 12,
  kPointwiseOperation = 13,
  kOperationGraph = 15,
  kVariantPack = 16,
  kTensor = 17,
  kProduct = 18,
  kProductOperation = 19,
  kReduction = 21,
  kReductionOperation = 22,
  kReshapeOperation = 31,
};
enum Type : int { // cudnnBackendAttributeType_t
  kHandleType = 0,
  kDataTypeType = 1,
  kBoolean = 2,
  kInt64 = 3,
  kFloat = 4,
  kDouble = 5,
  kPointer = 6,
  kConvolutionMode = 7,
  kHeuristicsMode = 8,
  kNumericalNote = 11,
  kPointwiseMode = 14,
  kDescriptor = 15,
  kReductionOperator = 18,
};
enum Attribute : int { // cudnnBackendAttributeName_t
  kPointwiseModeOf = 0,
  kPointwiseCompute = 1,
  kPointwiseAxis = 9,
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
  kPointwiseOf = 750,
  kPointwiseX = 751,
  kPointwiseB = 752,
  kPointwiseY = 753,
  kPointwiseFactorX = 754,
  kPointwiseFactorB = 755,
  kPointwiseT = 758,
  kGraphHandle = 800,
  kGraphOperations = 801,
  kTensorAlignment = 900,
  kTensorDataType = 901,
  kTensorDimensions = 902,
  kTensorStrides = 903,
  kTensorId = 906,
  kTensorIsVirtual = 907,
  kTensorIsByValue = 908,
  kPackIds = 1000,
  kPackPointers = 1001,
  kPackWorkspace = 1003,
  kEngineNotes = 1303,
  kProductCompute = 1500,
  kProductA = 1520,
  kProductB = 1521,
  kProductC = 1522,
  kProductOf = 1523,
  kReductionOperatorOf = 1600,
  kReductionCompute = 1601,
  kReductionX = 1610,
  kReductionY = 1611,
  kReductionOf = 1612,
  kReshapeX = 2200,
  kReshapeY = 2201,
};
enum Number : int { // cudnnDataType_t
  kFloatNumbers = 0,
  kDoubleNumbers = 1,
  kHalfNumbers = 2,
  kInt32Numbers = 4,
  kBfloat16Numbers = 9,
  kBooleans = 11,
};
enum Note : int { kTensorCore = 0, kConvertsInputs = 1, kNondeterministic = 4 }; // cudnnBackendNumericalNote_t

constexpr int64_t kAlignment = 16; // bytes, of all tensors: docs/driver-contract.md
constexpr size_t kMaxPlans = 1024; // of a device and a kind of Shape

// A status other than 0.
struct Failure {
  int status;
};

void check(int status); // throws Failure

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

// Where a tensor is.
enum class Place {
  Device,
  Host, // a number, which Plan::run() reads
  Virtual, // between operations of a graph
};

// The descriptor of a tensor. `id`: unique in the graph.
Descriptor tensor(
    int64_t id,
    Number type,
    const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& strides,
    Place place = Place::Device);

// The graph of `operations`, finalized.
Descriptor operation_graph(void* handle, c10::ArrayRef<void*> operations);

// What cuDNN notes about the numbers that an engine computes.
class Notes {
 public:
  explicit Notes(const Descriptor& config);
  bool has(Note note) const;

 private:
  std::array<int, 10> notes_{}; // CUDNN_NUMERICAL_NOTE_TYPE_COUNT
  int64_t count_;
};

// An execution plan. It must be used by one thread at a time.
class Plan {
 public:
  // Takes the first engine that works and that `accepts`. Returns the last status if there is none. `graph` returns the
  // descriptors of a graph, which is the last one and uses the others.
  int build(
      void* handle, c10::function_ref<std::vector<Descriptor>()> graph, c10::function_ref<bool(const Notes&)> accepts);

  int64_t workspace() const {
    return workspace_;
  }

  // `ids`, `memory`: of the tensors that are not virtual. Values are in the host's memory.
  int run(void* handle, c10::ArrayRef<int64_t> ids, c10::ArrayRef<void*> memory, void* workspace) const;

  std::mutex mutex;

 private:
  int finalize(void* handle, const Descriptor& config);

  bool is_built_ = false;
  std::vector<Descriptor> used_; // by the plan
  std::optional<Descriptor> plan_;
  int64_t workspace_ = 0; // bytes
};

// Calls `use` with a handle of the device, while its context is current.
int with_handle(size_t index, c10::function_ref<int(void* handle)> use);

// Calls `use` with a handle and the built plan, while the device's context is current. A Shape is the key of a plan,
// and has graph(handle) and accepts(notes), the arguments of Plan::build().
template <typename Shape>
int with_plan(size_t index, const Shape& shape, c10::function_ref<int(void* handle, const Plan&)> use) {
  static auto& caches = *[] { // never destroyed: cuDNN can be unloaded before
    auto* const made = new std::vector<std::unique_ptr<LruCache<Shape, Plan>>>;
    for (size_t i = 0; i < kMostDevices; ++i) {
      made->push_back(std::make_unique<LruCache<Shape, Plan>>(kMaxPlans));
    }
    return made;
  }();
  return with_handle(index, [&](void* handle) {
    const auto plan = caches.at(index)->get(shape, [] { return std::make_shared<Plan>(); });
    const std::lock_guard<std::mutex> guard(plan->mutex);
    const int status = plan->build(
        handle, [&] { return shape.graph(handle); }, [&](const Notes& notes) { return shape.accepts(notes); });
    return status != 0 ? status : use(handle, *plan);
  });
}

struct NumberType {
  const char* name; // PyTorch's
  Number type;
};

using Call = int (*)(size_t index, size_t type, void* queue, const CArgument* arguments);

// A routine has no argument for the device and the dtype, so each pair has a separate function.
template <Call call, size_t index, size_t type>
int routine(void* queue, const CArgument* arguments, uint64_t) {
  return call(index, type, queue, arguments);
}
template <Call call, size_t types, size_t... pairs>
constexpr std::array<LibraryRoutine, sizeof...(pairs)> all_routines(std::index_sequence<pairs...>) {
  return {&routine<call, pairs / types, pairs % types>...};
}
template <Call call, size_t types>
inline constexpr auto kRoutinesOf = all_routines<call, types>(std::make_index_sequence<kMostDevices * types>());

// The routines of a family, and their workspace.
struct Routines {
  const char* family;
  c10::ArrayRef<NumberType> types;
  c10::ArrayRef<LibraryRoutine> functions; // of device 0 and each type, of device 1, …
  size_t integers; // how many the family has
  // Returns the status of the routine, which tells whether cuDNN has an engine for the call, and the bytes of memory
  // that it needs. `type`: in `types`.
  std::pair<int, size_t> (*workspace)(size_t index, size_t type, c10::ArrayRef<int64_t> integers);
};

namespace convolution {
const Routines& routines();
}
namespace attention {
const Routines& forward_routines();
const Routines& backward_routines();
} // namespace attention

} // namespace backplane::cuda::dnn
