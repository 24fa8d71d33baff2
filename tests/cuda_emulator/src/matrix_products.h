// Matrix products of the emulated cuBLAS and cuBLASLt.

#pragma once

#include <algorithm>
#include <complex>
#include <utility>

#include "device_library.h"
#include "numbers.h"

enum Status : int { // cublasStatus_t
  kSuccess = 0,
  kNotInitialized = 1,
  kInvalidValue = 7,
  kExecutionFailed = 13,
  kInternalError = 14,
  kNotSupported = 15,
};

namespace {

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
  const char* bias = nullptr; // one number for each row of c, of real products
  bool relu = false;
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
        if constexpr (std::is_same_v<Wide, double>) {
          sum += product.bias == nullptr ? 0 : Wide(reinterpret_cast<const T*>(product.bias)[row]);
          sum = product.relu ? std::max(sum, 0.0) : sum;
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

// Null for an unknown cudaDataType.
const Type* type_of(int number) {
  const auto* type = std::find_if(std::begin(types), std::end(types), [&](auto& one) { return one.number == number; });
  return type == std::end(types) ? nullptr : type;
}

// Whether a matrix with as many rows and columns in memory is valid.
bool is_valid(const Matrix& one, int64_t rows, int64_t columns, int64_t batch, size_t bytes) {
  if (one.columns < std::max<int64_t>(1, rows)) {
    return false;
  }
  const auto elements = static_cast<size_t>((batch - 1) * one.step + (columns - 1) * one.columns + rows);
  return is_device_memory(one.memory, elements * bytes);
}

bool is_valid(const Product& product, size_t bytes) {
  const auto valid = [&](const Matrix& one, int64_t rows, int64_t columns) {
    return one.transposed ? is_valid(one, columns, rows, product.batch, bytes)
                          : is_valid(one, rows, columns, product.batch, bytes);
  };
  return valid(product.a, product.m, product.k) && valid(product.b, product.k, product.n) &&
      valid(product.c, product.m, product.n);
}

// Submits the work of a call, and spoils the workspace meanwhile: it is not free for others.
int submit_call(CUstream stream, char* workspace, size_t bytes, const std::function<void()>& work) {
  const auto call = [work, workspace, bytes] {
    memset(workspace, 0xff, std::min<size_t>(bytes, 4096));
    work();
  };
  return submit(stream, call) == CUDA_SUCCESS ? kSuccess : kExecutionFailed;
}

} // namespace
