// libcublas: matrix products and triangular systems in host memory.

#include <algorithm>
#include <complex>
#include <utility>

#include "library_handle.h"
#include "numbers.h"

enum Status : int {
  kSuccess = 0,
  kNotInitialized = 1,
  kInvalidValue = 7,
  kExecutionFailed = 13,
  kInternalError = 14,
  kNotSupported = 15,
};

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

struct Matrix {
  const char* memory;
  int type;
  int64_t columns; // elements from one column to the next
  long long step; // from one matrix to the next
  bool transposed;
};

// What is rounded, other than results. The sums are computed in double, unlike in NVIDIA's library.
enum class Rounded { kNothing, kOperandsToTf32, kSums, kHalvesOfSums };

struct Product {
  Matrix a, b, c;
  int64_t m, n, k, batch;
  std::complex<double> alpha, beta;
  Rounded what = Rounded::kNothing;
};

template <class T, class Wide>
Wide element(const Matrix& of, int64_t batch, int64_t row, int64_t column) {
  const int64_t at = of.transposed ? row * of.columns + column : column * of.columns + row;
  return Wide(reinterpret_cast<const T*>(of.memory)[batch * of.step + at]);
}

template <class Wide>
Wide factor(std::complex<double> value) {
  if constexpr (std::is_same_v<Wide, double>) {
    return value.real();
  } else {
    return value;
  }
}

template <class T, class Wide>
void compute(const Product& product) {
  const Wide alpha = factor<Wide>(product.alpha), beta = factor<Wide>(product.beta);
  const bool to_tf32 = product.what == Rounded::kOperandsToTf32 && uses_tf32();
  const auto operand = [to_tf32](Wide value) { return to_tf32 ? tf32(value) : value; };
  const auto narrow = [](Wide value) { return Wide(rounded<T>(value)); };
  const int64_t half = product.what == Rounded::kHalvesOfSums ? product.k / 2 : 0;
  for (int64_t batch = 0; batch < product.batch; ++batch) {
    for (int64_t column = 0; column < product.n; ++column) {
      for (int64_t row = 0; row < product.m; ++row) {
        Wide sum = 0, first_half = 0;
        for (int64_t i = 0; i < product.k; ++i) {
          if (i == half) {
            first_half = std::exchange(sum, 0);
          }
          sum += operand(element<T, Wide>(product.a, batch, row, i)) *
              operand(element<T, Wide>(product.b, batch, i, column));
          sum = product.what == Rounded::kSums ? narrow(sum) : sum;
        }
        sum = half == 0 ? sum : narrow(first_half) + narrow(sum);
        sum *= alpha;
        if (beta != Wide(0)) { // else the result is not read
          sum += beta * element<T, Wide>(product.c, batch, row, column);
        }
        auto* to = reinterpret_cast<T*>(const_cast<char*>(product.c.memory));
        to[batch * product.c.step + column * product.c.columns + row] = rounded<T>(sum);
      }
    }
  }
}

struct Type {
  int number; // cudaDataType
  size_t bytes;
  int compute; // cublasComputeType_t, also for alpha and beta
  bool is_complex;
  void (*product)(const Product&);
};
constexpr int kFloat = 68, kDouble = 70;
constexpr int kHalf = 64, kFloatInTf32 = 77; // instead of kFloat, for some types
constexpr int kNoReducedSums = 16; // of cublasMath_t
constexpr Type types[] = {
    {0, 4, kFloat, false, &compute<float, double>},
    {1, 8, kDouble, false, &compute<double, double>},
    {2, 2, kFloat, false, &compute<_Float16, double>},
    {14, 2, kFloat, false, &compute<BFloat16, double>},
    {4, 8, kFloat, true, &compute<std::complex<float>, std::complex<double>>},
    {5, 16, kDouble, true, &compute<std::complex<double>, std::complex<double>>},
};

std::complex<double> read(const void* number, const Type& type, int compute) {
  if (compute == kHalf) {
    return static_cast<double>(*static_cast<const _Float16*>(number));
  }
  double parts[2] = {};
  for (int i = 0; i <= type.is_complex; ++i) {
    parts[i] = type.compute == kFloat ? static_cast<const float*>(number)[i] : static_cast<const double*>(number)[i];
  }
  return {parts[0], parts[1]};
}

bool accepts(const Type& type, int compute) {
  const bool is_float32 = type.compute == kFloat && type.bytes == (type.is_complex ? 8 : 4);
  return compute == type.compute || (compute == kFloatInTf32 && is_float32) || (compute == kHalf && type.number == 2);
}

Rounded rounded_in(const Handle& handle, const Type& type, int compute) {
  return compute == kFloatInTf32                            ? Rounded::kOperandsToTf32
      : compute == kHalf                                    ? Rounded::kSums
      : type.bytes == 2 && !(handle.mode & kNoReducedSums) ? Rounded::kHalvesOfSums
                                                            : Rounded::kNothing;
}

// Whether a matrix with as many rows and columns in memory is valid.
bool is_valid(const Matrix& one, int64_t rows, int64_t columns, int64_t batch, size_t bytes) {
  if (one.columns < std::max<int64_t>(1, rows)) {
    return false;
  }
  const auto elements = static_cast<size_t>((batch - 1) * one.step + (columns - 1) * one.columns + rows);
  return is_device_memory(one.memory, elements * bytes);
}

// Submits the work of a call, and spoils the workspace meanwhile: it is not free for others.
int submit_call(Handle& handle, const std::function<void()>& work) {
  const auto call = [work, workspace = handle.workspace, bytes = handle.workspace_bytes] {
    memset(workspace, 0xff, std::min<size_t>(bytes, 4096));
    work();
  };
  return submit(handle.stream, call) == CUDA_SUCCESS ? kSuccess : kExecutionFailed;
}

int multiply(Handle& handle, const Product& product, int compute, int algorithm, const void* alpha, const void* beta) {
  const auto* type =
      std::find_if(std::begin(types), std::end(types), [&](auto& one) { return one.number == product.a.type; });
  REQUIRE(type != std::end(types) && product.b.type == type->number, kNotSupported);
  REQUIRE(product.c.type == type->number && accepts(*type, compute) && algorithm == -1, kNotSupported);
  REQUIRE(product.m > 0 && product.n > 0 && product.k > 0 && product.batch > 0, kInvalidValue); // 0 is not emulated
  REQUIRE(alpha != nullptr && beta != nullptr, kInvalidValue);
  const auto valid = [&](const Matrix& one, int64_t rows, int64_t columns) {
    return one.transposed ? is_valid(one, columns, rows, product.batch, type->bytes)
                          : is_valid(one, rows, columns, product.batch, type->bytes);
  };
  REQUIRE(valid(product.a, product.m, product.k) && valid(product.b, product.k, product.n), kInvalidValue);
  REQUIRE(valid(product.c, product.m, product.n), kInvalidValue);
  Product given = product;
  given.alpha = read(alpha, *type, compute);
  given.beta = read(beta, *type, compute);
  given.what = rounded_in(handle, *type, compute);
  return submit_call(handle, [given, type] { type->product(given); });
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
  return submit_call(handle, [given, alpha] { solve<T>(given, alpha); });
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
