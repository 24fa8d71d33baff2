// What cuBLAS and cuBLASLt have in common: the types of matrices, and the arguments of the families of products.
#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <compare>
#include <cstdint>
#include <cstring>

#include "drivers/cuda/cuda_calls.h"

namespace backplane::cuda {

// From cublas_api.h and library_types.h, whose enums are ints.
constexpr int kPlain = 0, kTransposed = 1; // cublasOperation_t
constexpr int kComputeFloat = 68, kComputeDouble = 70; // cublasComputeType_t
constexpr int kComputeHalf = 64, kComputeFloatInTf32 = 77; // if they are allowed
constexpr int kTypeFloat = 0, kTypeDouble = 1, kTypeHalf = 2, kTypeBFloat16 = 14; // cudaDataType
constexpr int kTypeComplexFloat = 4, kTypeComplexDouble = 5;

// What the integer «allowed» of products allows, as a sum (torch_backplane.drivers.libraries.Allowed).
constexpr int64_t kAllowsTf32 = 1, kAllowsRoundedSums = 2, kAllowsHalfSums = 4, kAllowsDividedSums = 8;

// The cublasComputeType_t of a product whose type is computed in `compute`, unless `allowed` allows a faster one.
inline int compute_type(int compute, int64_t allowed) {
  return (allowed & kAllowsTf32) != 0 ? kComputeFloatInTf32 : (allowed & kAllowsHalfSums) != 0 ? kComputeHalf : compute;
}

// alpha or beta: up to two doubles.
struct Factor {
  // As the libraries expect it: in float16 if sums are.
  Factor converted(int compute) const {
    Factor factor = *this;
    if (compute == kComputeHalf) {
      float value = 0;
      std::memcpy(&value, bytes, sizeof value);
      const c10::Half half(value);
      std::memcpy(factor.bytes, &half, sizeof half);
    }
    return factor;
  }

  alignas(double) char bytes[2 * sizeof(double)];
};

// Reads a factor of one part, or of two if it is complex, and advances the pointer.
inline Factor read_factor(const CArgument*& next, int parts) {
  Factor factor{};
  char* to = factor.bytes;
  for (int i = 0; i < parts; ++i, ++next) {
    to = std::copy_n(static_cast<const char*>(next->data), next->bytes, to);
  }
  return factor;
}

// The integers of the family matmul (docs/driver-contract.md), with which those of linear begin.
struct ProductIntegers {
  int64_t batch, rows, columns, depth; // c is rows x columns
  int64_t c_row, a_row, b_row; // elements from one row in memory to the next
  int64_t a_transposed, b_transposed;
  int64_t c_step, a_step, b_step; // elements from one matrix to the next
  int64_t allowed, alignment, form;
  auto operator<=>(const ProductIntegers&) const = default;
};
constexpr int kProductIntegers = sizeof(ProductIntegers) / sizeof(int64_t);

// Reads the integers and advances the pointer.
inline ProductIntegers read_product(const CArgument*& next) {
  int64_t values[kProductIntegers];
  for (int64_t& value : values) {
    value = *static_cast<const int64_t*>((next++)->data);
  }
  ProductIntegers found{};
  std::memcpy(&found, values, sizeof found);
  return found;
}

inline int operation_of(int64_t transposed) {
  return transposed != 0 ? kTransposed : kPlain;
}

} // namespace backplane::cuda
