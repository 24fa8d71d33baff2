#include "drivers/cuda/cublaslt.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <compare>
#include <memory>
#include <mutex>
#include <utility>

#include "drivers/cuda/cuda_calls.h"
#include "drivers/cuda/cuda_launcher.h"
#include "drivers/cuda/handle_pool.h"
#include "drivers/cuda/matrix_products.h"
#include "drivers/lru_cache.h"

namespace backplane::cuda::lt {
namespace {

// From cublasLt.h, whose enums are ints or attributes of the given types.
constexpr int kInvalidProduct = 7, kNotSupported = 15; // cublasStatus_t
constexpr int kFirstOperation = 3, kSecondOperation = 4, kEpilogue = 7, kBias = 8; // cublasLtMatmulDescAttributes_t
constexpr int kBatchCount = 5, kBatchStep = 6; // cublasLtMatrixLayoutAttribute_t
constexpr int kMostWorkspace = 1, kReductionSchemes = 3; // cublasLtMatmulPreferenceAttributes_t
constexpr int kAlignments[] = {5, 6, 7, 8}; // likewise, of A, B, C and D
constexpr uint32_t kNoEpilogue = 1, kRelu = 2, kAddBias = 4; // cublasLtEpilogue_t
constexpr uint32_t kUndivided = 0, kInComputeType = 2, kAnyScheme = 7; // cublasLtReductionScheme_t
struct Algorithm { // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace; // bytes
  int status;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Algorithm) == 96);

constexpr int kMostAlgorithms = 8;
constexpr size_t kMaxPlans = 1024; // of a device

// clang-format off
#define BACKPLANE_CUBLASLT_FUNCTIONS(FUNCTION) \
  FUNCTION(cublasLtCreate, (void** handle)) \
  FUNCTION(cublasLtMatmulDescCreate, (void** product, int compute, int factor_type)) \
  FUNCTION(cublasLtMatmulDescDestroy, (void* product)) \
  FUNCTION(cublasLtMatmulDescSetAttribute, (void* product, int attribute, const void* value, size_t bytes)) \
  FUNCTION(cublasLtMatrixLayoutCreate, (void** matrix, int type, uint64_t rows, uint64_t columns, int64_t step)) \
  FUNCTION(cublasLtMatrixLayoutDestroy, (void* matrix)) \
  FUNCTION(cublasLtMatrixLayoutSetAttribute, (void* matrix, int attribute, const void* value, size_t bytes)) \
  FUNCTION(cublasLtMatmulPreferenceCreate, (void** preference)) \
  FUNCTION(cublasLtMatmulPreferenceDestroy, (void* preference)) \
  FUNCTION(cublasLtMatmulPreferenceSetAttribute, (void* preference, int attribute, const void* value, size_t bytes)) \
  FUNCTION(cublasLtMatmulAlgoGetHeuristic, ( \
    void* handle, void* product, void* a, void* b, void* c, void* d, void* preference, int most, Algorithm* found, \
    int* count)) \
  FUNCTION(cublasLtMatmul, ( \
    void* handle, void* product, const void* alpha, const void* a_memory, void* a, const void* b_memory, void* b, \
    const void* beta, const void* c_memory, void* c, void* d_memory, void* d, const uint64_t* algorithm, \
    void* workspace, size_t bytes, void* stream))
// clang-format on

struct CublasLtApi {
#define BACKPLANE_CUBLASLT_MEMBER(name, parameters) int(*name) parameters = nullptr;
  BACKPLANE_CUBLASLT_FUNCTIONS(BACKPLANE_CUBLASLT_MEMBER)
#undef BACKPLANE_CUBLASLT_MEMBER
};
CublasLtApi cublas_lt;
std::array<size_t, kMostDevices> most_workspace{}; // bytes that an algorithm can have on a device

struct Type {
  const char* name; // PyTorch's
  int type; // cudaDataType
  int compute; // unless something else is allowed
};
constexpr std::array<Type, 4> kTypes{{
    {"float32", kTypeFloat, kComputeFloat},
    {"float64", kTypeDouble, kComputeDouble},
    {"float16", kTypeHalf, kComputeFloat},
    {"bfloat16", kTypeBFloat16, kComputeFloat},
}};

constexpr int kMatmul = 0, kLinear = 1; // families
constexpr std::array<const char*, 2> kFamilies{"matmul", "linear"};

// What is computed, but for the algorithm: the key of a plan.
struct Shape {
  size_t type; // in kTypes
  ProductIntegers integers; // whose form is 0
  uint32_t epilogue;
  auto operator<=>(const Shape&) const = default;

  int compute() const {
    return compute_type(kTypes[type].compute, integers.allowed);
  }

  // cudaDataType of alpha and beta.
  int factor_type() const {
    return compute() == kComputeDouble ? kTypeDouble : compute() == kComputeHalf ? kTypeHalf : kTypeFloat;
  }

  // The ways to divide sums that are allowed.
  uint32_t schemes() const {
    const int number = kTypes[type].type;
    const bool is_half = number == kTypeHalf || number == kTypeBFloat16;
    return (integers.allowed & kAllowsDividedSums) == 0           ? kUndivided
        : is_half && (integers.allowed & kAllowsRoundedSums) == 0 ? kInComputeType
                                                                  : kAnyScheme;
  }
};

// An object of cuBLASLt.
struct Destroy {
  int (*function)(void*);
  void operator()(void* one) const {
    static_cast<void>(function(one));
  }
};
using Object = std::unique_ptr<void, Destroy>;

template <typename Value>
int set(int (*function)(void*, int, const void*, size_t), const Object& object, int attribute, Value value) {
  return function(object.get(), attribute, &value, sizeof value);
}

// The descriptors and the algorithms of a shape. cuBLASLt's matrices have contiguous columns, so it computes the
// transpose of c: its A is b, its B is a, and its C and D are c. The device's context is current in all functions.
class Plan {
 public:
  int query(size_t index, void* handle, const Shape& shape, int64_t form, AlgorithmsFound* found) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const int status = build(index, handle, shape, form);
    found->count = algorithms_.size(); // also if there is none for `form`
    if (status == 0) {
      found->workspace = algorithms_[static_cast<size_t>(form)].workspace;
    }
    return status;
  }

  // `memory`: c, a, b, and the bias if the epilogue adds one.
  int multiply(
      size_t index,
      void* handle,
      const Shape& shape,
      int64_t form,
      const CArgument* memory,
      const std::pair<Factor, Factor>& factors,
      const CArgument* workspace,
      void* queue) {
    const std::lock_guard<std::mutex> guard(mutex_); // the bias is set for each call
    int status = build(index, handle, shape, form);
    if (status == 0 && (shape.epilogue & kAddBias) != 0) {
      status = set_product(kBias, static_cast<const void*>(memory[3].memory));
    }
    if (status != 0) {
      return status;
    }
    const Factor alpha = factors.first.converted(shape.compute()), beta = factors.second.converted(shape.compute());
    const Algorithm& one = algorithms_[static_cast<size_t>(form)];
    const auto bytes = static_cast<size_t>(*static_cast<const int64_t*>(workspace[1].data));
    return cublas_lt.cublasLtMatmul(
        handle, product_.get(), alpha.bytes, memory[2].memory, a_.get(), memory[1].memory, b_.get(), beta.bytes,
        memory[0].memory, c_.get(), memory[0].memory, c_.get(), one.algorithm, workspace[0].memory, bytes, queue);
  }

 private:
  // Finds the algorithms, if that was not done, and checks that there is one for `form`.
  int build(size_t index, void* handle, const Shape& shape, int64_t form) {
    if (!is_built_) {
      const OutsideCapture allocates;
      if (const int status = describe(shape)) {
        return status;
      }
      const int status = search(index, handle, shape);
      if (status != 0 && status != kNotSupported) {
        return status;
      }
      is_built_ = true;
    }
    if (algorithms_.empty()) {
      return kNotSupported;
    }
    return form >= 0 && form < static_cast<int64_t>(algorithms_.size()) ? 0 : kInvalidProduct;
  }

  int describe(const Shape& shape) {
    const ProductIntegers& of = shape.integers;
    void* made = nullptr;
    int status = cublas_lt.cublasLtMatmulDescCreate(&made, shape.compute(), shape.factor_type());
    if (status != 0) {
      return status;
    }
    product_ = Object(made, {cublas_lt.cublasLtMatmulDescDestroy});
    status = set_product(kFirstOperation, operation_of(of.b_transposed));
    status = status != 0 ? status : set_product(kSecondOperation, operation_of(of.a_transposed));
    status = status != 0 ? status : set_product(kEpilogue, shape.epilogue);
    if (status == 0 && (shape.epilogue & kAddBias) != 0) { // the alignment of the pointer counts
      status = set_product(kBias, reinterpret_cast<const void*>(static_cast<uintptr_t>(of.alignment)));
    }
    const auto layout = [&](Object& to, bool transposed, int64_t rows, int64_t columns, int64_t row, int64_t step) {
      // As the transpose of what is in memory, in which a row has as many elements as the operand has columns.
      status = status != 0 ? status
                           : describe(shape, transposed ? columns : rows, transposed ? rows : columns, row, step, to);
    };
    layout(a_, of.b_transposed != 0, of.depth, of.columns, of.b_row, of.b_step);
    layout(b_, of.a_transposed != 0, of.rows, of.depth, of.a_row, of.a_step);
    layout(c_, false, of.rows, of.columns, of.c_row, of.c_step);
    return status;
  }

  // Describes a matrix with as many rows and columns in memory.
  static int describe(const Shape& shape, int64_t rows, int64_t columns, int64_t row, int64_t step, Object& to) {
    void* made = nullptr;
    int status = cublas_lt.cublasLtMatrixLayoutCreate(
        &made, kTypes[shape.type].type, static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), row);
    if (status != 0) {
      return status;
    }
    to = Object(made, {cublas_lt.cublasLtMatrixLayoutDestroy});
    if (shape.integers.batch > 1) {
      status =
          set(cublas_lt.cublasLtMatrixLayoutSetAttribute, to, kBatchCount, static_cast<int32_t>(shape.integers.batch));
      status = status != 0 ? status : set(cublas_lt.cublasLtMatrixLayoutSetAttribute, to, kBatchStep, step);
    }
    return status;
  }

  int search(size_t index, void* handle, const Shape& shape) {
    void* made = nullptr;
    int status = cublas_lt.cublasLtMatmulPreferenceCreate(&made);
    if (status != 0) {
      return status;
    }
    const Object preference(made, {cublas_lt.cublasLtMatmulPreferenceDestroy});
    const auto prefer = [&](int attribute, auto value) {
      status = status != 0 ? status : set(cublas_lt.cublasLtMatmulPreferenceSetAttribute, preference, attribute, value);
    };
    prefer(kMostWorkspace, static_cast<uint64_t>(most_workspace.at(index)));
    prefer(kReductionSchemes, shape.schemes());
    for (const int attribute : kAlignments) {
      prefer(attribute, static_cast<uint32_t>(shape.integers.alignment));
    }
    std::array<Algorithm, kMostAlgorithms> found{};
    int count = 0;
    if (status == 0) {
      status = cublas_lt.cublasLtMatmulAlgoGetHeuristic(
          handle, product_.get(), a_.get(), b_.get(), c_.get(), c_.get(), preference.get(), kMostAlgorithms,
          found.data(), &count);
    }
    if (status == 0) {
      algorithms_.assign(found.begin(), found.begin() + std::clamp(count, 0, kMostAlgorithms));
      const auto is_unusable = [](const Algorithm& one) { return one.status != 0; };
      algorithms_.erase(std::remove_if(algorithms_.begin(), algorithms_.end(), is_unusable), algorithms_.end());
    }
    return status;
  }

  template <typename Value>
  int set_product(int attribute, Value value) {
    return set(cublas_lt.cublasLtMatmulDescSetAttribute, product_, attribute, value);
  }

  std::mutex mutex_;
  bool is_built_ = false;
  Object product_, a_, b_, c_;
  std::vector<Algorithm> algorithms_;
};

// The plans of a device.
struct Plans {
  LruCache<Shape, Plan> cache{kMaxPlans};
};

// Calls `use` with a handle and the plan of a shape, while the device's context is current.
int with_plan(size_t index, const Shape& shape, c10::function_ref<int(void* handle, Plan& plan)> use) {
  // Never destroyed: cuBLASLt can be unloaded before.
  static auto& handles = *new HandlePools<void*>;
  static auto& plans = *new std::array<Plans, kMostDevices>;
  return call_in_context(index, [&] {
    return handles.at(index).with(
        [](void** made) { return cublas_lt.cublasLtCreate(made); },
        [&](void* handle) {
          return use(handle, *plans.at(index).cache.get(shape, [] { return std::make_shared<Plan>(); }));
        });
  });
}

// The shape, and its algorithm.
std::pair<Shape, int64_t> shape_of(int family, size_t type, const ProductIntegers& given, int64_t activation) {
  Shape shape{type, given, kNoEpilogue};
  shape.integers.form = 0;
  if (family == kLinear) {
    shape.epilogue = kAddBias | (activation != 0 ? kRelu : 0);
  }
  return {shape, given.form};
}

// The arguments of a family (docs/driver-contract.md), with a workspace.
int multiply(size_t index, size_t type, int family, void* queue, const CArgument* arguments) {
  const CArgument* next = arguments + (family == kLinear ? 4 : 3);
  std::pair<Factor, Factor> factors{read_factor(next, 1), {}};
  if (family == kMatmul) {
    factors.second = read_factor(next, 1);
  }
  const ProductIntegers integers = read_product(next);
  const int64_t activation = family == kLinear ? *static_cast<const int64_t*>((next++)->data) : 0;
  const auto [shape, form] = shape_of(family, type, integers, activation);
  return with_plan(index, shape, [&, &shape = shape, form = form](void* handle, Plan& plan) {
    return plan.multiply(index, handle, shape, form, arguments, factors, next, queue);
  });
}

// A routine has no argument for the device, the dtype and the family, so each combination has a separate function.
template <size_t index, size_t type, int family>
int routine(void* queue, const CArgument* arguments, uint64_t) {
  return multiply(index, type, family, queue, arguments);
}

template <int family, size_t... pairs>
constexpr std::array<LibraryRoutine, sizeof...(pairs)> all_routines(std::index_sequence<pairs...>) {
  return {&routine<pairs / kTypes.size(), pairs % kTypes.size(), family>...};
}
constexpr auto kPairs = std::make_index_sequence<kMostDevices * kTypes.size()>();
constexpr std::array kRoutines{all_routines<kMatmul>(kPairs), all_routines<kLinear>(kPairs)};

} // namespace

std::vector<std::string> functions() {
#define BACKPLANE_CUBLASLT_NAME(name, parameters) #name,
  return {BACKPLANE_CUBLASLT_FUNCTIONS(BACKPLANE_CUBLASLT_NAME)};
#undef BACKPLANE_CUBLASLT_NAME
}

std::map<std::string, std::map<std::string, uintptr_t>> routines(
    const std::map<std::string, uintptr_t>& functions, size_t index, size_t workspace) {
#define BACKPLANE_CUBLASLT_LOAD(name, parameters) \
  cublas_lt.name = reinterpret_cast<decltype(cublas_lt.name)>(function_of(functions, "cuBLASLt", #name));
  BACKPLANE_CUBLASLT_FUNCTIONS(BACKPLANE_CUBLASLT_LOAD)
#undef BACKPLANE_CUBLASLT_LOAD
  most_workspace.at(index) = workspace;
  std::map<std::string, std::map<std::string, uintptr_t>> found;
  for (size_t family = 0; family < kFamilies.size(); ++family) {
    for (size_t type = 0; type < kTypes.size(); ++type) {
      found[kFamilies[family]][kTypes[type].name] =
          reinterpret_cast<uintptr_t>(kRoutines[family].at(index * kTypes.size() + type));
    }
  }
  return found;
}

AlgorithmsFound algorithms(
    size_t index, const std::string& family, const std::string& dtype, const std::vector<int64_t>& integers) {
  const auto type = std::find_if(kTypes.begin(), kTypes.end(), [&](const auto& one) { return one.name == dtype; });
  const auto of = std::find(kFamilies.begin(), kFamilies.end(), family) - kFamilies.begin();
  const size_t expected = kProductIntegers + (of == kLinear ? 1 : 0);
  TORCH_CHECK_VALUE(
      type != kTypes.end() && static_cast<size_t>(of) < kFamilies.size() && integers.size() == expected,
      "cuBLASLt has no ", family, " in ", dtype, ", or there are not ", expected, " integers");
  ProductIntegers given{};
  std::memcpy(&given, integers.data(), sizeof given);
  const auto [shape, form] = shape_of(
      static_cast<int>(of), static_cast<size_t>(type - kTypes.begin()), given, of == kLinear ? integers.back() : 0);
  AlgorithmsFound found;
  found.status = with_plan(index, shape, [&, &shape = shape, form = form](void* handle, Plan& plan) {
    return plan.query(index, handle, shape, form, &found);
  });
  return found;
}

} // namespace backplane::cuda::lt
