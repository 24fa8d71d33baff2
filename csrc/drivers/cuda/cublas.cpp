#include "drivers/cuda/cublas.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

#include "drivers/cuda/cuda_calls.h"
#include "drivers/cuda/cuda_launcher.h"

namespace backplane::cuda {
namespace {

// From cublas_api.h and library_types.h, whose enums are ints.
constexpr int kPlain = 0, kTransposed = 1; // cublasOperation_t
constexpr int kComputeFloat = 68, kComputeDouble = 70; // cublasComputeType_t
constexpr int kNoReducedSums = 16; // cublasMath_t: CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
constexpr int kDefaultAlgorithm = -1; // cublasGemmAlgo_t

// clang-format off
#define BACKPLANE_CUBLAS_FUNCTIONS(FUNCTION) \
  FUNCTION(cublasCreate_v2, (void** handle)) \
  FUNCTION(cublasDestroy_v2, (void* handle)) \
  FUNCTION(cublasSetMathMode, (void* handle, int mode)) \
  FUNCTION(cublasSetStream_v2, (void* handle, void* stream)) \
  FUNCTION(cublasSetWorkspace_v2, (void* handle, void* workspace, size_t bytes)) \
  FUNCTION(cublasGemmEx_64, ( \
    void* handle, int a_operation, int b_operation, int64_t m, int64_t n, int64_t k, const void* alpha, \
    const void* a, int a_type, int64_t a_columns, const void* b, int b_type, int64_t b_columns, const void* beta, \
    void* c, int c_type, int64_t c_columns, int compute, int algorithm)) \
  FUNCTION(cublasGemmStridedBatchedEx_64, ( \
    void* handle, int a_operation, int b_operation, int64_t m, int64_t n, int64_t k, const void* alpha, \
    const void* a, int a_type, int64_t a_columns, long long a_step, \
    const void* b, int b_type, int64_t b_columns, long long b_step, const void* beta, \
    void* c, int c_type, int64_t c_columns, long long c_step, int64_t batch, int compute, int algorithm))
// clang-format on

struct CublasApi {
#define BACKPLANE_CUBLAS_MEMBER(name, parameters) int(*name) parameters = nullptr;
  BACKPLANE_CUBLAS_FUNCTIONS(BACKPLANE_CUBLAS_MEMBER)
#undef BACKPLANE_CUBLAS_MEMBER
};
CublasApi cublas;

struct MatrixType {
  const char* name; // PyTorch's
  int type; // cudaDataType
  int compute; // also the type of alpha and beta
  int parts; // of alpha and beta: 2 for complex numbers
};
constexpr std::array<MatrixType, 6> kMatrixTypes{{
    {"float32", 0, kComputeFloat, 1},
    {"float64", 1, kComputeDouble, 1},
    {"float16", 2, kComputeFloat, 1},
    {"bfloat16", 14, kComputeFloat, 1},
    {"complex64", 4, kComputeFloat, 2},
    {"complex128", 5, kComputeDouble, 2},
}};

// The handles of a device that no thread uses. As stream and workspace are set for each call, any handle will do, and
// there are as many as threads that submit at the same time. Handles live as long as the process, as contexts do.
class Handles {
 public:
  int take(void** handle) {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      if (!unused_.empty()) {
        *handle = unused_.back();
        unused_.pop_back();
        return 0;
      }
    }
    const OutsideCapture allocates;
    if (const int status = cublas.cublasCreate_v2(handle)) {
      return status;
    }
    const int status = cublas.cublasSetMathMode(*handle, kNoReducedSums);
    if (status != 0) {
      static_cast<void>(cublas.cublasDestroy_v2(*handle));
    }
    return status;
  }

  void give_back(void* handle) {
    const std::lock_guard<std::mutex> guard(mutex_);
    unused_.push_back(handle);
  }

 private:
  std::mutex mutex_;
  std::vector<void*> unused_;
};

std::array<Handles, kMostDevices>& handles() {
  static auto& all = *new std::array<Handles, kMostDevices>; // never destroyed: cuBLAS can be unloaded before
  return all;
}

// alpha or beta: up to two doubles.
struct Factor {
  alignas(double) char bytes[2 * sizeof(double)];
};

// Reads a factor and advances the pointer.
Factor read_factor(const CArgument*& next, int parts) {
  Factor factor{};
  char* to = factor.bytes;
  for (int i = 0; i < parts; ++i, ++next) {
    to = std::copy_n(static_cast<const char*>(next->data), next->bytes, to);
  }
  return factor;
}

// The arguments of the family matmul (docs/driver-contract.md), with a workspace. cuBLAS's matrices have contiguous
// columns, so it computes the transpose of c, from the transposes of b and a.
int multiply(size_t index, const MatrixType& type, void* queue, const CArgument* arguments) {
  const CArgument &c = arguments[0], &a = arguments[1], &b = arguments[2];
  const CArgument* next = arguments + 3;
  const Factor alpha = read_factor(next, type.parts), beta = read_factor(next, type.parts);
  const auto integer = [next](int i) { return *static_cast<const int64_t*>(next[i].data); };
  const int64_t batch = integer(0), rows = integer(1), columns = integer(2), depth = integer(3);
  const int64_t c_row = integer(4), a_row = integer(5), b_row = integer(6);
  const int a_operation = integer(7) ? kTransposed : kPlain, b_operation = integer(8) ? kTransposed : kPlain;
  const int64_t c_step = integer(9), a_step = integer(10), b_step = integer(11);
  void* const workspace = next[12].memory;
  const auto bytes = static_cast<size_t>(integer(13));
  return call_in_context(index, [&] {
    void* handle = nullptr;
    if (const int status = handles()[index].take(&handle)) {
      return status;
    }
    int status = cublas.cublasSetStream_v2(handle, queue); // also resets the workspace
    status = status != 0 ? status : cublas.cublasSetWorkspace_v2(handle, workspace, bytes);
    if (status == 0 && batch == 1) {
      status = cublas.cublasGemmEx_64(
          handle, b_operation, a_operation, columns, rows, depth, alpha.bytes, b.memory, type.type, b_row, a.memory,
          type.type, a_row, beta.bytes, c.memory, type.type, c_row, type.compute, kDefaultAlgorithm);
    } else if (status == 0) {
      status = cublas.cublasGemmStridedBatchedEx_64(
          handle, b_operation, a_operation, columns, rows, depth, alpha.bytes, b.memory, type.type, b_row, b_step,
          a.memory, type.type, a_row, a_step, beta.bytes, c.memory, type.type, c_row, c_step, batch, type.compute,
          kDefaultAlgorithm);
    }
    handles()[index].give_back(handle);
    return status;
  });
}

// A routine has no argument for the device and the dtype, so each pair has a separate function.
template <size_t index, size_t type>
int product(void* queue, const CArgument* arguments, uint64_t) {
  return multiply(index, kMatrixTypes[type], queue, arguments);
}

template <size_t... pairs>
constexpr std::array<LibraryRoutine, sizeof...(pairs)> all_products(std::index_sequence<pairs...>) {
  return {&product<pairs / kMatrixTypes.size(), pairs % kMatrixTypes.size()>...};
}
constexpr auto kProducts = all_products(std::make_index_sequence<kMostDevices * kMatrixTypes.size()>());

} // namespace

std::vector<std::string> cublas_functions() {
#define BACKPLANE_CUBLAS_NAME(name, parameters) #name,
  return {BACKPLANE_CUBLAS_FUNCTIONS(BACKPLANE_CUBLAS_NAME)};
#undef BACKPLANE_CUBLAS_NAME
}

std::map<std::string, uintptr_t> cublas_products(const std::map<std::string, uintptr_t>& functions, size_t index) {
#define BACKPLANE_CUBLAS_LOAD(name, parameters) \
  cublas.name = reinterpret_cast<decltype(cublas.name)>(function_of(functions, "cuBLAS", #name));
  BACKPLANE_CUBLAS_FUNCTIONS(BACKPLANE_CUBLAS_LOAD)
#undef BACKPLANE_CUBLAS_LOAD
  std::map<std::string, uintptr_t> found;
  for (size_t type = 0; type < kMatrixTypes.size(); ++type) {
    found[kMatrixTypes[type].name] = reinterpret_cast<uintptr_t>(kProducts.at(index * kMatrixTypes.size() + type));
  }
  return found;
}

int cublas_prepare(size_t index) {
  return call_in_context(index, [index] {
    void* handle = nullptr;
    const int status = handles()[index].take(&handle);
    if (status == 0) {
      handles()[index].give_back(handle);
    }
    return status;
  });
}

} // namespace backplane::cuda
