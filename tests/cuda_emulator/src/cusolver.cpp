// libcusolver: decompositions and solvers of its 64-bit API, in host memory. Matrices have contiguous columns.

#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>
#include <numeric>
#include <vector>

#include "library_handle.h"

enum Status : int {
  kSuccess = 0,
  kNotInitialized = 1,
  kInvalidValue = 3,
  kExecutionFailed = 6,
  kInternalError = 7,
  kNotSupported = 9,
  kInvalidWorkspace = 31,
};

namespace {

struct Handle : LibraryHandle {};
struct Params {};

#define ENTER_HANDLE(given, params)                                            \
  ENTER();                                                                     \
  const Use use(given);                                                        \
  RETURN_STATUS(use.status(kNotInitialized, kInternalError, kExecutionFailed)) \
  REQUIRE((params) == nullptr || find(params) != nullptr, kInvalidValue)

constexpr int kPlain = 0, kConjugated = 2; // cublasOperation_t

// What a number is computed in.
template <class T>
struct WideOf {
  using type = double;
};
template <class T>
struct WideOf<std::complex<T>> {
  using type = std::complex<double>;
};
template <class T>
using Wide = typename WideOf<T>::type;

double conjugate(double value) {
  return value;
}
std::complex<double> conjugate(std::complex<double> value) {
  return std::conj(value);
}

// What LAPACK compares to choose a pivot.
double magnitude(double value) {
  return std::abs(value);
}
double magnitude(std::complex<double> value) {
  return std::abs(value.real()) + std::abs(value.imag());
}

template <class T>
struct Matrix {
  T* memory;
  int64_t columns; // elements from one column to the next
  T& operator()(int64_t row, int64_t column) const {
    return memory[column * columns + row];
  }
};

// A copy to compute with, column by column.
template <class W>
struct Values {
  int64_t rows;
  std::vector<W> all;

  template <class T>
  Values(const Matrix<T>& from, int64_t rows, int64_t columns) : rows(rows), all(rows * columns) {
    for (int64_t i = 0; i < rows * columns; ++i) {
      all[i] = W(from(i % rows, i / rows));
    }
  }
  W& operator()(int64_t row, int64_t column) {
    return all[column * rows + row];
  }
  template <class T>
  void store(const Matrix<T>& to) {
    for (size_t i = 0; i < all.size(); ++i) {
      to(i % rows, i / rows) = T(all[i]);
    }
  }
};

// a = l lᴴ, or uᴴ u. Spoils the other triangle, which NVIDIA's library does not define.
template <class T>
void cholesky(const Matrix<T>& a, bool upper, int64_t n, int* info) {
  Values<Wide<T>> l(a, n, n);
  const auto at = [&](int64_t row, int64_t column) -> Wide<T>& { return upper ? l(column, row) : l(row, column); };
  *info = 0;
  for (int64_t j = 0; j < n && *info == 0; ++j) { // of the upper triangle, the conjugates: uᵀ is conjugate to l
    double square = std::real(at(j, j));
    for (int64_t k = 0; k < j; ++k) {
      square -= std::norm(at(j, k));
    }
    if (!(square > 0)) {
      *info = static_cast<int>(j) + 1;
      break;
    }
    at(j, j) = std::sqrt(square);
    for (int64_t i = j + 1; i < n; ++i) {
      for (int64_t k = 0; k < j; ++k) {
        at(i, j) -= at(i, k) * conjugate(at(j, k));
      }
      at(i, j) /= at(j, j);
    }
  }
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t column = row + 1; column < n; ++column) {
      at(row, column) = std::numeric_limits<double>::quiet_NaN();
    }
  }
  l.store(a);
}

template <class T>
void lu(const Matrix<T>& a, int64_t m, int64_t n, int64_t* pivots, int* info) {
  Values<Wide<T>> values(a, m, n);
  *info = 0;
  for (int64_t j = 0; j < std::min(m, n); ++j) {
    int64_t pivot = j;
    for (int64_t i = j + 1; i < m; ++i) {
      pivot = magnitude(values(i, j)) > magnitude(values(pivot, j)) ? i : pivot;
    }
    pivots[j] = pivot + 1;
    for (int64_t k = 0; k < n; ++k) {
      std::swap(values(j, k), values(pivot, k));
    }
    if (values(j, j) == 0.0) {
      *info = *info != 0 ? *info : static_cast<int>(j) + 1;
      continue;
    }
    for (int64_t i = j + 1; i < m; ++i) {
      values(i, j) /= values(j, j);
      for (int64_t k = j + 1; k < n; ++k) {
        values(i, k) -= values(i, j) * values(j, k);
      }
    }
  }
  values.store(a);
}

// b becomes the solution of op(a) x = b.
template <class T>
void solve(const Matrix<T>& a, const int64_t* pivots, const Matrix<T>& b, int operation, int64_t n, int64_t columns) {
  using W = Wide<T>;
  Values<W> factors(a, n, n), x(b, n, columns);
  const bool transposed = operation != kPlain;
  const auto element = [&](int64_t row, int64_t column) {
    const W value = transposed ? factors(column, row) : factors(row, column);
    return operation == kConjugated ? conjugate(value) : value;
  };
  const auto swap = [&](int64_t row) {
    for (int64_t column = 0; column < columns; ++column) {
      std::swap(x(row, column), x(pivots[row] - 1, column));
    }
  };
  const auto substitute = [&](bool forward, bool unit) {
    for (int64_t column = 0; column < columns; ++column) {
      for (int64_t step = 0; step < n; ++step) {
        const int64_t row = forward ? step : n - 1 - step;
        for (int64_t i = 0; i < step; ++i) {
          const int64_t other = forward ? i : n - 1 - i;
          x(row, column) -= element(row, other) * x(other, column);
        }
        x(row, column) /= unit ? W(1) : element(row, row);
      }
    }
  };
  for (int64_t row = 0; row < n && !transposed; ++row) {
    swap(row);
  }
  substitute(true, !transposed);
  substitute(false, transposed);
  for (int64_t row = n; row-- > 0 && transposed;) {
    swap(row);
  }
  x.store(b);
}

// Jacobi's method. Eigenvalues ascend.
template <class T, class Real>
void eigenvalues(const Matrix<T>& given, Real* to, bool vectors, bool upper, int64_t n, int* info) {
  using W = Wide<T>;
  Values<W> a(given, n, n);
  for (int64_t j = 0; j < n; ++j) {
    a(j, j) = std::real(a(j, j));
    for (int64_t i = 0; i < j; ++i) {
      (upper ? a(j, i) : a(i, j)) = conjugate(upper ? a(i, j) : a(j, i));
    }
  }
  std::vector<W> turned(n * n); // the eigenvectors, column by column
  for (int64_t i = 0; i < n; ++i) {
    turned[i * n + i] = 1;
  }
  constexpr int kMostSweeps = 60;
  double rest = 1;
  for (int sweep = 0; sweep < kMostSweeps && rest != 0; ++sweep) {
    rest = 0;
    for (int64_t p = 0; p < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        const double size = std::abs(a(p, q)), least = std::abs(a(p, p)) + std::abs(a(q, q));
        if (size <= 1e-17 * least) { // NaN is not
          continue;
        }
        rest += size;
        const double tau = std::real(a(q, q) - a(p, p)) / (2 * size);
        const double tangent = (tau < 0 ? -1 : 1) / (std::abs(tau) + std::sqrt(1 + tau * tau));
        const double cosine = 1 / std::sqrt(1 + tangent * tangent);
        const W sine = tangent * cosine * (a(p, q) / size);
        const auto turn = [&](W& x, W& y) {
          const W before = x;
          x = cosine * x - conjugate(sine) * y;
          y = sine * before + cosine * y;
        };
        for (int64_t i = 0; i < n; ++i) {
          turn(a(i, p), a(i, q));
          turn(turned[p * n + i], turned[q * n + i]);
        }
        for (int64_t i = 0; i < n; ++i) { // the rows, conjugate to the columns
          W x = conjugate(a(p, i)), y = conjugate(a(q, i));
          turn(x, y);
          a(p, i) = conjugate(x);
          a(q, i) = conjugate(y);
        }
      }
    }
  }
  *info = rest == 0 ? 0 : static_cast<int>(n);
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  if (rest == 0) { // else there are NaN
    std::sort(order.begin(), order.end(), [&](auto i, auto j) { return std::real(a(i, i)) < std::real(a(j, j)); });
  }
  for (int64_t j = 0; j < n; ++j) {
    to[j] = static_cast<Real>(std::real(a(order[j], order[j])));
    for (int64_t i = 0; i < n; ++i) {
      given(i, j) = vectors ? T(turned[order[j] * n + i]) : T(std::numeric_limits<double>::quiet_NaN());
    }
  }
}

// Calls `use` with a number of the type, a cudaDataType.
template <class Function>
int with_type(int type, const Function& use) {
  switch (type) {
    case 0:
      return use(float());
    case 1:
      return use(double());
    case 4:
      return use(std::complex<float>());
    case 5:
      return use(std::complex<double>());
    default:
      return kNotSupported;
  }
}

size_t bytes_of(int type) {
  return type == 0 ? sizeof(float) : type == 5 ? 2 * sizeof(double) : sizeof(double);
}

struct Needed {
  size_t on_device, on_host;
};

// Large matrices need host memory, too.
Needed needed(int64_t rows, int64_t columns, int type) {
  return {static_cast<size_t>(rows * columns) * bytes_of(type), columns > 32 ? 64u : 0u};
}

struct Workspace {
  void* on_device;
  size_t device_bytes;
  void* on_host;
  size_t host_bytes;
};

bool is_matrix(const void* memory, int64_t rows, int64_t columns, int64_t step, int type) {
  return rows > 0 && columns > 0 && step >= rows && // 0 is not emulated
      is_device_memory(memory, static_cast<size_t>((columns - 1) * step + rows) * bytes_of(type));
}

// Uses the host memory, which is valid only during the call, and the device memory, which is not free for others.
int submit_call(Handle& handle, const Needed& needed, const Workspace& given, const std::function<void()>& work) {
  REQUIRE(given.device_bytes >= needed.on_device && given.host_bytes >= needed.on_host, kInvalidWorkspace);
  REQUIRE(is_device_memory(given.on_device, needed.on_device), kInvalidValue);
  if (needed.on_host != 0) {
    REQUIRE(given.on_host != nullptr, kInvalidValue);
    REQUIRE(emulator_prepare() == CUDA_SUCCESS, kInternalError); // it is no part of a graph
    memset(given.on_host, 0xff, needed.on_host);
  }
  const auto call = [work, memory = given.on_device, bytes = needed.on_device] {
    memset(memory, 0xff, bytes);
    work();
  };
  return submit(handle.stream, call) == CUDA_SUCCESS ? kSuccess : kExecutionFailed;
}

bool is_choice(int value) {
  return value == 0 || value == 1;
}

int answer(const Needed& needed, int type, int compute, size_t* on_device, size_t* on_host) {
  REQUIRE(compute == type, kNotSupported);
  *on_device = needed.on_device;
  *on_host = needed.on_host;
  return with_type(type, [](auto) { return kSuccess; });
}

} // namespace

API cusolverGetProperty(int which, int* value) {
  ENTER();
  return property(reinterpret_cast<void*>(&cusolverGetProperty), which, value, kInvalidValue);
}

API cusolverDnCreate(Handle** made) {
  ENTER();
  REQUIRE(made != nullptr, kInvalidValue);
  *made = made_handle<Handle>();
  return *made == nullptr ? kNotInitialized : kSuccess;
}

API cusolverDnDestroy(Handle* handle) {
  ENTER();
  return Registry<Handle>::all().remove(handle) == nullptr ? kNotInitialized : kSuccess;
}

API cusolverDnCreateParams(Params** made) {
  ENTER();
  REQUIRE(made != nullptr, kInvalidValue);
  *made = Registry<Params>::all().add(std::make_shared<Params>());
  return kSuccess;
}

API cusolverDnSetStream(Handle* handle, CUstream stream) {
  ENTER_HANDLE(handle, static_cast<Params*>(nullptr));
  use.handle->stream = stream;
  return kSuccess;
}

API cusolverDnXpotrf_bufferSize(
    Handle* handle,
    Params* params,
    int fill,
    int64_t n,
    int type,
    const void*,
    int64_t,
    int compute,
    size_t* on_device,
    size_t* on_host) {
  ENTER_HANDLE(handle, params);
  REQUIRE(is_choice(fill) && n > 0, kInvalidValue);
  return answer(needed(n, n, type), type, compute, on_device, on_host);
}

API cusolverDnXpotrf(
    Handle* handle,
    Params* params,
    int fill,
    int64_t n,
    int type,
    void* a,
    int64_t step,
    int compute,
    void* on_device,
    size_t device_bytes,
    void* on_host,
    size_t host_bytes,
    int* info) {
  ENTER_HANDLE(handle, params);
  REQUIRE(is_choice(fill) && is_matrix(a, n, n, step, type), kInvalidValue);
  REQUIRE(compute == type && is_device_memory(info, sizeof *info), kInvalidValue);
  const Workspace given{on_device, device_bytes, on_host, host_bytes};
  return with_type(type, [&](auto number) {
    const Matrix<decltype(number)> matrix{static_cast<decltype(number)*>(a), step};
    return submit_call(*use.handle, needed(n, n, type), given, [=] { cholesky(matrix, fill == 1, n, info); });
  });
}

API cusolverDnXgetrf_bufferSize(
    Handle* handle,
    Params* params,
    int64_t m,
    int64_t n,
    int type,
    const void*,
    int64_t,
    int compute,
    size_t* on_device,
    size_t* on_host) {
  ENTER_HANDLE(handle, params);
  REQUIRE(m > 0 && n > 0, kInvalidValue);
  return answer(needed(m, n, type), type, compute, on_device, on_host);
}

API cusolverDnXgetrf(
    Handle* handle,
    Params* params,
    int64_t m,
    int64_t n,
    int type,
    void* a,
    int64_t step,
    int64_t* pivots,
    int compute,
    void* on_device,
    size_t device_bytes,
    void* on_host,
    size_t host_bytes,
    int* info) {
  ENTER_HANDLE(handle, params);
  REQUIRE(is_matrix(a, m, n, step, type) && compute == type, kInvalidValue);
  REQUIRE(is_device_memory(pivots, std::min(m, n) * sizeof *pivots), kInvalidValue);
  REQUIRE(is_device_memory(info, sizeof *info), kInvalidValue);
  const Workspace given{on_device, device_bytes, on_host, host_bytes};
  return with_type(type, [&](auto number) {
    const Matrix<decltype(number)> matrix{static_cast<decltype(number)*>(a), step};
    return submit_call(*use.handle, needed(m, n, type), given, [=] { lu(matrix, m, n, pivots, info); });
  });
}

API cusolverDnXgetrs(
    Handle* handle,
    Params* params,
    int operation,
    int64_t n,
    int64_t columns,
    int a_type,
    const void* a,
    int64_t a_step,
    const int64_t* pivots,
    int b_type,
    void* b,
    int64_t b_step,
    int* info) {
  ENTER_HANDLE(handle, params);
  REQUIRE(operation >= kPlain && operation <= kConjugated && a_type == b_type, kInvalidValue);
  REQUIRE(is_matrix(a, n, n, a_step, a_type) && is_matrix(b, n, columns, b_step, b_type), kInvalidValue);
  REQUIRE(is_device_memory(pivots, n * sizeof *pivots) && is_device_memory(info, sizeof *info), kInvalidValue);
  return with_type(a_type, [&](auto number) {
    using T = decltype(number);
    const Matrix<T> factors{static_cast<T*>(const_cast<void*>(a)), a_step}, x{static_cast<T*>(b), b_step};
    const auto work = [=] {
      solve(factors, pivots, x, operation, n, columns);
      *info = 0;
    };
    return submit(use.handle->stream, work) == CUDA_SUCCESS ? kSuccess : kExecutionFailed;
  });
}

API cusolverDnXsyevd_bufferSize(
    Handle* handle,
    Params* params,
    int vectors,
    int fill,
    int64_t n,
    int type,
    const void*,
    int64_t,
    int real_type,
    const void*,
    int compute,
    size_t* on_device,
    size_t* on_host) {
  ENTER_HANDLE(handle, params);
  REQUIRE(is_choice(vectors) && is_choice(fill) && n > 0 && real_type == type % 4, kInvalidValue);
  return answer(needed(n, n, type), type, compute, on_device, on_host);
}

API cusolverDnXsyevd(
    Handle* handle,
    Params* params,
    int vectors,
    int fill,
    int64_t n,
    int type,
    void* a,
    int64_t step,
    int real_type,
    void* values,
    int compute,
    void* on_device,
    size_t device_bytes,
    void* on_host,
    size_t host_bytes,
    int* info) {
  ENTER_HANDLE(handle, params);
  REQUIRE(is_choice(vectors) && is_choice(fill) && is_matrix(a, n, n, step, type), kInvalidValue);
  REQUIRE(compute == type && real_type == type % 4, kInvalidValue); // CUDA_R_32F, CUDA_R_64F
  REQUIRE(is_device_memory(values, n * bytes_of(real_type)) && is_device_memory(info, sizeof *info), kInvalidValue);
  const Workspace given{on_device, device_bytes, on_host, host_bytes};
  return with_type(type, [&](auto number) {
    using T = decltype(number);
    using Real = decltype(std::real(number));
    const Matrix<T> matrix{static_cast<T*>(a), step};
    auto* const to = static_cast<Real*>(values);
    return submit_call(
        *use.handle, needed(n, n, type), given, [=] { eigenvalues(matrix, to, vectors == 1, fill == 1, n, info); });
  });
}
