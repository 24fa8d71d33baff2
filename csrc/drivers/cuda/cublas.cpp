#include "drivers/cuda/cublas.h"

#include <array>
#include <utility>

#include "drivers/cuda/cuda_calls.h"
#include "drivers/cuda/cuda_launcher.h"
#include "drivers/cuda/handle_pool.h"
#include "drivers/cuda/matrix_products.h"

namespace backplane::cuda {
namespace {

// From cublas_api.h, whose enums are ints.
constexpr int kLeft = 0, kRight = 1; // cublasSideMode_t
constexpr int kLower = 0, kUpper = 1; // cublasFillMode_t
constexpr int kNotUnit = 0, kUnit = 1; // cublasDiagType_t
constexpr int kNoReducedSums = 16; // cublasMath_t: CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
constexpr int kDefaultAlgorithm = -1; // cublasGemmAlgo_t

// clang-format off
// For matrices of numbers of any type.
#define BACKPLANE_CUBLAS_SOLVE ( \
    void* handle, int side, int fill, int operation, int diagonal, int64_t m, int64_t n, const void* alpha, \
    const void* a, int64_t a_columns, void* b, int64_t b_columns)

#define BACKPLANE_CUBLAS_FUNCTIONS(FUNCTION) \
  FUNCTION(cublasCreate_v2, (void** handle)) \
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
    void* c, int c_type, int64_t c_columns, long long c_step, int64_t batch, int compute, int algorithm)) \
  FUNCTION(cublasStrsm_v2_64, BACKPLANE_CUBLAS_SOLVE) \
  FUNCTION(cublasDtrsm_v2_64, BACKPLANE_CUBLAS_SOLVE) \
  FUNCTION(cublasCtrsm_v2_64, BACKPLANE_CUBLAS_SOLVE) \
  FUNCTION(cublasZtrsm_v2_64, BACKPLANE_CUBLAS_SOLVE)
// clang-format on

struct CublasApi {
#define BACKPLANE_CUBLAS_MEMBER(name, parameters) int(*name) parameters = nullptr;
  BACKPLANE_CUBLAS_FUNCTIONS(BACKPLANE_CUBLAS_MEMBER)
#undef BACKPLANE_CUBLAS_MEMBER
};
CublasApi cublas;

constexpr float kFloatOne[2] = {1, 0}; // also as a complex number
constexpr double kDoubleOne[2] = {1, 0};

struct MatrixType {
  const char* name; // PyTorch's
  int type; // cudaDataType
  int64_t bytes; // of a number
  int compute; // also the type of alpha and beta
  int parts; // of alpha and beta: 2 for complex numbers
  const void* one; // as alpha
  decltype(CublasApi::cublasStrsm_v2_64) CublasApi::* solve; // null if there is none
};
constexpr std::array<MatrixType, 6> kMatrixTypes{{
    {"float32", kTypeFloat, 4, kComputeFloat, 1, kFloatOne, &CublasApi::cublasStrsm_v2_64},
    {"float64", kTypeDouble, 8, kComputeDouble, 1, kDoubleOne, &CublasApi::cublasDtrsm_v2_64},
    {"float16", kTypeHalf, 2, kComputeFloat, 1, kFloatOne, nullptr},
    {"bfloat16", kTypeBFloat16, 2, kComputeFloat, 1, kFloatOne, nullptr},
    {"complex64", kTypeComplexFloat, 8, kComputeFloat, 2, kFloatOne, &CublasApi::cublasCtrsm_v2_64},
    {"complex128", kTypeComplexDouble, 16, kComputeDouble, 2, kDoubleOne, &CublasApi::cublasZtrsm_v2_64},
}};

// Calls `use` with a handle, while the device's context is current.
int with_handle(size_t index, c10::function_ref<int(void* handle)> use) {
  static auto& all = *new HandlePools<void*>; // never destroyed: cuBLAS can be unloaded before
  return call_in_context(
      index, [&] { return all.at(index).with([](void** made) { return cublas.cublasCreate_v2(made); }, use); });
}

// The same, with the native queue and a workspace.
int with_handle(
    size_t index,
    void* queue,
    const CArgument& workspace,
    const CArgument& bytes,
    c10::function_ref<int(void* handle)> use) {
  return with_handle(index, [&](void* handle) {
    int status = cublas.cublasSetStream_v2(handle, queue); // also resets the workspace
    if (status == 0) {
      status = cublas.cublasSetWorkspace_v2(
          handle, workspace.memory, static_cast<size_t>(*static_cast<const int64_t*>(bytes.data)));
    }
    return status != 0 ? status : use(handle);
  });
}

// The arguments of the family matmul (docs/driver-contract.md), with a workspace. cuBLAS's matrices have contiguous
// columns, so it computes the transpose of c, from the transposes of b and a.
int multiply(size_t index, const MatrixType& type, void* queue, const CArgument* arguments) {
  const CArgument &c = arguments[0], &a = arguments[1], &b = arguments[2];
  const CArgument* next = arguments + 3;
  const Factor given_alpha = read_factor(next, type.parts), given_beta = read_factor(next, type.parts);
  const ProductIntegers of = read_product(next);
  const int compute = compute_type(type.compute, of.allowed);
  const Factor alpha = given_alpha.converted(compute), beta = given_beta.converted(compute);
  const int a_operation = operation_of(of.a_transposed), b_operation = operation_of(of.b_transposed);
  return with_handle(index, queue, next[0], next[1], [&](void* handle) {
    const int mode = (of.allowed & kAllowsRoundedSums) != 0 ? 0 : kNoReducedSums;
    if (const int status = cublas.cublasSetMathMode(handle, mode)) {
      return status;
    }
    if (of.batch == 1) {
      return cublas.cublasGemmEx_64(
          handle, b_operation, a_operation, of.columns, of.rows, of.depth, alpha.bytes, b.memory, type.type, of.b_row,
          a.memory, type.type, of.a_row, beta.bytes, c.memory, type.type, of.c_row, compute, kDefaultAlgorithm);
    }
    return cublas.cublasGemmStridedBatchedEx_64(
        handle, b_operation, a_operation, of.columns, of.rows, of.depth, alpha.bytes, b.memory, type.type, of.b_row,
        of.b_step, a.memory, type.type, of.a_row, of.a_step, beta.bytes, c.memory, type.type, of.c_row, of.c_step,
        of.batch, compute, kDefaultAlgorithm);
  });
}

// The arguments of the family triangular_solve, with a workspace. cuBLAS solves for one matrix, or for an array of
// addresses in device memory, which would have to be made.
int solve_triangular(size_t index, const MatrixType& type, void* queue, const CArgument* arguments) {
  const auto integer = [arguments](int i) { return *static_cast<const int64_t*>(arguments[2 + i].data); };
  const int side = integer(0) != 0 ? kLeft : kRight, fill = integer(1) != 0 ? kUpper : kLower;
  const auto operation = static_cast<int>(integer(2));
  const int diagonal = integer(3) != 0 ? kUnit : kNotUnit;
  const int64_t batch = integer(4), rows = integer(5), columns = integer(6), a_column = integer(7);
  const int64_t a_bytes = integer(8) * type.bytes, b_bytes = rows * columns * type.bytes; // of a step
  return with_handle(index, queue, arguments[11], arguments[12], [&](void* handle) {
    int status = 0;
    for (int64_t i = 0; i < batch && status == 0; ++i) {
      const void* const a = static_cast<const char*>(arguments[1].memory) + i * a_bytes;
      void* const b = static_cast<char*>(arguments[0].memory) + i * b_bytes;
      status =
          (cublas.*type.solve)(handle, side, fill, operation, diagonal, rows, columns, type.one, a, a_column, b, rows);
    }
    return status;
  });
}

// A routine has no argument for the device and the dtype, so each pair has a separate function.
using Compute = int (*)(size_t index, const MatrixType& type, void* queue, const CArgument* arguments);

template <Compute compute, size_t index, size_t type>
int routine(void* queue, const CArgument* arguments, uint64_t) {
  return compute(index, kMatrixTypes[type], queue, arguments);
}

template <Compute compute, size_t... pairs>
constexpr std::array<LibraryRoutine, sizeof...(pairs)> all_routines(std::index_sequence<pairs...>) {
  return {&routine<compute, pairs / kMatrixTypes.size(), pairs % kMatrixTypes.size()>...};
}
constexpr auto kPairs = std::make_index_sequence<kMostDevices * kMatrixTypes.size()>();
constexpr auto kProducts = all_routines<&multiply>(kPairs);
constexpr auto kSolvers = all_routines<&solve_triangular>(kPairs);

} // namespace

std::vector<std::string> cublas_functions() {
#define BACKPLANE_CUBLAS_NAME(name, parameters) #name,
  return {BACKPLANE_CUBLAS_FUNCTIONS(BACKPLANE_CUBLAS_NAME)};
#undef BACKPLANE_CUBLAS_NAME
}

std::map<std::string, std::map<std::string, uintptr_t>> cublas_routines(
    const std::map<std::string, uintptr_t>& functions, size_t index) {
#define BACKPLANE_CUBLAS_LOAD(name, parameters) \
  cublas.name = reinterpret_cast<decltype(cublas.name)>(function_of(functions, "cuBLAS", #name));
  BACKPLANE_CUBLAS_FUNCTIONS(BACKPLANE_CUBLAS_LOAD)
#undef BACKPLANE_CUBLAS_LOAD
  std::map<std::string, std::map<std::string, uintptr_t>> found;
  for (size_t type = 0; type < kMatrixTypes.size(); ++type) {
    const char* const name = kMatrixTypes[type].name;
    const size_t pair = index * kMatrixTypes.size() + type;
    found["matmul"][name] = reinterpret_cast<uintptr_t>(kProducts.at(pair));
    if (kMatrixTypes[type].solve != nullptr) {
      found["triangular_solve"][name] = reinterpret_cast<uintptr_t>(kSolvers.at(pair));
    }
  }
  return found;
}

int cublas_prepare(size_t index) {
  return with_handle(index, [](void*) { return 0; });
}

} // namespace backplane::cuda
