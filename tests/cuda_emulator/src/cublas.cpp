// libcublas: matrix products and triangular systems in host memory.

#include <algorithm>
#include <complex>
#include <utility>

#include "library_handle.h"
#include "matrix_products.h"

constexpr int kPlain = 0, kConjugated = 2; // cublasOperation_t

namespace {

struct Handle : LibraryHandle {
  int mode = 0; // cublasMath_t
  char* workspace = nullptr;
  size_t workspace_bytes = 0;
};

#define ENTER_HANDLE(given) \
  ENTER();                  \
  const Use use(given);     \
  RETURN_STATUS(use.status(kNotInitialized, kInternalError, kExecutionFailed))

constexpr int kNoReducedSums = 16; // of cublasMath_t

Rounded rounded_in(const Handle& handle, const Type& type, int compute) {
  return compute == kFloatInTf32                            ? Rounded::kOperandsToTf32
      : compute == kHalf                                    ? Rounded::kSums
      : type.bytes == 2 && !(handle.mode & kNoReducedSums) ? Rounded::kHalvesOfSums
                                                            : Rounded::kNothing;
}

int multiply(Handle& handle, const Product& product, int compute, int algorithm, const void* alpha, const void* beta) {
  const Type* const type = type_of(product.a.type);
  REQUIRE(type != nullptr && product.b.type == type->number, kNotSupported);
  REQUIRE(product.c.type == type->number && accepts(*type, compute) && algorithm == -1, kNotSupported);
  REQUIRE(product.m > 0 && product.n > 0 && product.k > 0 && product.batch > 0, kInvalidValue); // 0 is not emulated
  REQUIRE(alpha != nullptr && beta != nullptr, kInvalidValue);
  REQUIRE(is_valid(product, type->bytes), kInvalidValue);
  Product given = product;
  given.alpha = read(alpha, *type, compute);
  given.beta = read(beta, *type, compute);
  given.what = rounded_in(handle, *type, compute);
  return submit_call(handle.stream, handle.workspace, handle.workspace_bytes, [given, type] { type->product(given); });
}

// op(a) x = alpha b if `left`, else x op(a) = alpha b. b becomes x.
struct Triangular {
  bool left, upper, unit;
  int operation;
  int64_t m, n; // of b
  const void* alpha;
  const void* a;
  int64_t a_columns;
  void* b;
  int64_t b_columns;
};

template <class T>
T conjugate(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return value;
  } else {
    return std::conj(value);
  }
}

// Solves op(a)ᵀ xᵀ = bᵀ if a is on the right, so that each line of b, a column or a row, is a separate system.
template <class T>
void solve(const Triangular& given, T alpha) {
  const auto* a = static_cast<const T*>(given.a);
  auto* b = static_cast<T*>(given.b);
  const int64_t size = given.left ? given.m : given.n, lines = given.left ? given.n : given.m;
  const bool transposed = (given.operation != kPlain) == given.left;
  const bool forward = given.upper == transposed;
  const auto element = [&](int64_t row, int64_t column) {
    const T value = transposed ? a[row * given.a_columns + column] : a[column * given.a_columns + row];
    return given.operation == kConjugated ? conjugate(value) : value;
  };
  for (int64_t line = 0; line < lines; ++line) {
    const auto x = [&](int64_t i) -> T& {
      return given.left ? b[line * given.b_columns + i] : b[i * given.b_columns + line];
    };
    for (int64_t step = 0; step < size; ++step) {
      const int64_t row = forward ? step : size - 1 - step;
      T sum = alpha * x(row);
      for (int64_t i = 0; i < step; ++i) {
        const int64_t column = forward ? i : size - 1 - i;
        sum -= element(row, column) * x(column);
      }
      x(row) = given.unit ? sum : sum / element(row, row);
    }
  }
}

template <class T>
int solve(Handle& handle, int side, int fill, int operation, int diagonal, const Triangular& triangular) {
  const auto is_choice = [](int value) { return value == 0 || value == 1; };
  REQUIRE(is_choice(side) && is_choice(fill) && is_choice(diagonal), kInvalidValue);
  REQUIRE(operation >= kPlain && operation <= kConjugated && triangular.alpha != nullptr, kInvalidValue);
  REQUIRE(triangular.m > 0 && triangular.n > 0, kInvalidValue); // 0 is not emulated
  Triangular given = triangular;
  given.left = side == 0;
  given.upper = fill == 1;
  given.operation = operation;
  given.unit = diagonal == 1;
  const int64_t size = given.left ? given.m : given.n;
  const Matrix a{static_cast<const char*>(given.a), 0, given.a_columns, 0, false};
  const Matrix b{static_cast<const char*>(given.b), 0, given.b_columns, 0, false};
  REQUIRE(is_valid(a, size, size, 1, sizeof(T)) && is_valid(b, given.m, given.n, 1, sizeof(T)), kInvalidValue);
  const T alpha = *static_cast<const T*>(given.alpha);
  return submit_call(handle.stream, handle.workspace, handle.workspace_bytes, [given, alpha] { solve<T>(given, alpha); });
}

} // namespace

API cublasGetProperty(int which, int* value) {
  ENTER();
  return property(reinterpret_cast<void*>(&cublasGetProperty), which, value, kInvalidValue);
}

API cublasCreate_v2(Handle** made) {
  ENTER();
  REQUIRE(made != nullptr, kInvalidValue);
  *made = made_handle<Handle>();
  return *made == nullptr ? kNotInitialized : kSuccess;
}

API cublasDestroy_v2(Handle* handle) {
  ENTER();
  return Registry<Handle>::all().remove(handle) == nullptr ? kNotInitialized : kSuccess;
}

API cublasSetMathMode(Handle* handle, int mode) {
  ENTER_HANDLE(handle);
  REQUIRE((mode & ~kNoReducedSums) == 0, kNotSupported);
  use.handle->mode = mode;
  return kSuccess;
}

API cublasSetStream_v2(Handle* handle, CUstream stream) {
  ENTER_HANDLE(handle);
  use.handle->stream = stream;
  use.handle->workspace = nullptr;
  use.handle->workspace_bytes = 0;
  return kSuccess;
}

API cublasSetWorkspace_v2(Handle* handle, char* workspace, size_t bytes) {
  ENTER_HANDLE(handle);
  REQUIRE(reinterpret_cast<uintptr_t>(workspace) % 256 == 0 && is_device_memory(workspace, bytes), kInvalidValue);
  use.handle->workspace = workspace;
  use.handle->workspace_bytes = bytes;
  return kSuccess;
}

API cublasGemmEx_64(
    Handle* handle,
    int a_operation,
    int b_operation,
    int64_t m,
    int64_t n,
    int64_t k,
    const void* alpha,
    const char* a,
    int a_type,
    int64_t a_columns,
    const char* b,
    int b_type,
    int64_t b_columns,
    const void* beta,
    char* c,
    int c_type,
    int64_t c_columns,
    int compute,
    int algorithm) {
  ENTER_HANDLE(handle);
  const Product product{
      {a, a_type, a_columns, 0, a_operation != 0},
      {b, b_type, b_columns, 0, b_operation != 0},
      {c, c_type, c_columns, 0, false},
      m,
      n,
      k,
      1,
      0,
      0};
  return multiply(*use.handle, product, compute, algorithm, alpha, beta);
}

API cublasGemmStridedBatchedEx_64(
    Handle* handle,
    int a_operation,
    int b_operation,
    int64_t m,
    int64_t n,
    int64_t k,
    const void* alpha,
    const char* a,
    int a_type,
    int64_t a_columns,
    long long a_step,
    const char* b,
    int b_type,
    int64_t b_columns,
    long long b_step,
    const void* beta,
    char* c,
    int c_type,
    int64_t c_columns,
    long long c_step,
    int64_t batch,
    int compute,
    int algorithm) {
  ENTER_HANDLE(handle);
  const Product product{
      {a, a_type, a_columns, a_step, a_operation != 0},
      {b, b_type, b_columns, b_step, b_operation != 0},
      {c, c_type, c_columns, c_step, false},
      m,
      n,
      k,
      batch,
      0,
      0};
  return multiply(*use.handle, product, compute, algorithm, alpha, beta);
}

#define TRIANGULAR_SOLVE(name, type)                                                                            \
  API name(                                                                                                     \
      Handle* handle, int side, int fill, int operation, int diagonal, int64_t m, int64_t n, const type* alpha, \
      const type* a, int64_t a_columns, type* b, int64_t b_columns) {                                           \
    ENTER_HANDLE(handle);                                                                                       \
    const Triangular triangular{false, false, false, 0, m, n, alpha, a, a_columns, b, b_columns};               \
    return solve<type>(*use.handle, side, fill, operation, diagonal, triangular);                               \
  }

TRIANGULAR_SOLVE(cublasStrsm_v2_64, float)
TRIANGULAR_SOLVE(cublasDtrsm_v2_64, double)
TRIANGULAR_SOLVE(cublasCtrsm_v2_64, std::complex<float>)
TRIANGULAR_SOLVE(cublasZtrsm_v2_64, std::complex<double>)
