// libcublasLt: matrix products with epilogues in host memory, by algorithms that a heuristic returns.

#include <cstdint>
#include <utility>

#include "library_handle.h"
#include "matrix_products.h"

namespace {

struct Handle : LibraryHandle {};

struct Operation {
  int compute; // cublasComputeType_t
  int factor_type; // cudaDataType of alpha and beta
  int a_operation = 0, b_operation = 0; // cublasOperation_t
  uint32_t epilogue = 1; // cublasLtEpilogue_t
  const void* bias = nullptr;
};

struct Layout {
  int type; // cudaDataType
  uint64_t rows, columns;
  int64_t step; // from one column to the next
  int32_t batch = 1;
  int64_t batch_step = 0;
  bool operator==(const Layout& other) const {
    return type == other.type && rows == other.rows && columns == other.columns && step == other.step &&
        batch == other.batch && batch_step == other.batch_step;
  }
};

struct Preference {
  uint64_t workspace = 0; // bytes
  uint32_t schemes = 7; // a mask of cublasLtReductionScheme_t
  uint32_t alignments[4] = {256, 256, 256, 256}; // of A, B, C, D
};

constexpr uint32_t kDefault = 1, kRelu = 2, kBias = 4; // cublasLtEpilogue_t
constexpr uint32_t kInPlace = 1, kInComputeType = 2, kInOutputType = 4; // cublasLtReductionScheme_t
constexpr uint32_t kAlignment = 16; // of the algorithm that loads vectors

// cublasLtMatmulAlgo_t, and the rest of cublasLtMatmulHeuristicResult_t.
struct Algorithm {
  uint64_t product; // for which it was found: another one refuses it
  uint64_t scheme; // 0: sums are not divided
  uint64_t alignment; // bytes
  uint64_t workspace; // bytes
  uint64_t unused[4];
};
struct Found {
  Algorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

// What an algorithm is found for.
uint64_t fingerprint(const Operation& operation, const Layout& a, const Layout& b, const Layout& c) {
  uint64_t hash = 1469598103934665603u;
  const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
  for (const int one : {operation.compute, operation.factor_type, operation.a_operation, operation.b_operation}) {
    add(static_cast<uint64_t>(one));
  }
  add(operation.epilogue);
  for (const Layout* one : {&a, &b, &c}) {
    add(static_cast<uint64_t>(one->type));
    add(one->rows);
    add(one->columns);
    add(static_cast<uint64_t>(one->step));
    add(static_cast<uint64_t>(one->batch));
    add(static_cast<uint64_t>(one->batch_step));
  }
  return hash;
}

// The product without memory. Returns a status.
int described(const Operation& operation, const Layout& a, const Layout& b, const Layout& c, Product* made) {
  const Type* const type = type_of(a.type);
  REQUIRE(type != nullptr && !type->is_complex && b.type == a.type && c.type == a.type, kNotSupported);
  const int factor_type = operation.compute == kHalf ? 2 : type->compute == kDouble ? 1 : 0;
  REQUIRE(accepts(*type, operation.compute) && operation.factor_type == factor_type, kNotSupported);
  REQUIRE(operation.a_operation <= 1 && operation.b_operation <= 1, kNotSupported); // others are not emulated
  REQUIRE((operation.epilogue & ~(kDefault | kRelu | kBias)) == 0, kNotSupported);
  REQUIRE(a.batch == b.batch && a.batch == c.batch && a.batch >= 1, kInvalidValue);
  const auto matrix = [](const Layout& of, int operation) {
    return Matrix{nullptr, of.type, of.step, of.batch_step, operation != 0};
  };
  *made = {};
  made->a = matrix(a, operation.a_operation);
  made->b = matrix(b, operation.b_operation);
  made->c = matrix(c, 0);
  made->m = static_cast<int64_t>(c.rows);
  made->n = static_cast<int64_t>(c.columns);
  made->k = static_cast<int64_t>(made->a.transposed ? a.rows : a.columns);
  made->batch = a.batch;
  made->relu = (operation.epilogue & kRelu) != 0;
  const bool fits = (made->a.transposed ? a.columns : a.rows) == c.rows &&
      (made->b.transposed ? b.rows : b.columns) == c.columns &&
      static_cast<int64_t>(made->b.transposed ? b.columns : b.rows) == made->k;
  REQUIRE(fits && made->m > 0 && made->n > 0 && made->k > 0, kInvalidValue); // 0 is not emulated
  return kSuccess;
}

bool is_aligned(const void* memory, uint64_t bytes) {
  return reinterpret_cast<uintptr_t>(memory) % bytes == 0;
}

template <class T, class... Given>
int create(T** made, Given... given) {
  REQUIRE(made != nullptr, kInvalidValue);
  *made = Registry<T>::all().add(std::make_shared<T>(T{given...}));
  return kSuccess;
}

template <class T>
int destroy(T* one) {
  return Registry<T>::all().remove(one) == nullptr ? kInvalidValue : kSuccess;
}

template <class T>
int set(T* to, const void* value, size_t bytes) {
  REQUIRE(value != nullptr && bytes == sizeof(T), kInvalidValue);
  memcpy(to, value, bytes);
  return kSuccess;
}

} // namespace

API cublasLtGetProperty(int which, int* value) {
  ENTER();
  return property(reinterpret_cast<void*>(&cublasLtGetProperty), which, value, kInvalidValue);
}

API cublasLtCreate(Handle** made) {
  ENTER();
  REQUIRE(made != nullptr, kInvalidValue);
  *made = made_handle<Handle>();
  return *made == nullptr ? kNotInitialized : kSuccess;
}

API cublasLtMatmulDescCreate(Operation** made, int compute, int factor_type) {
  ENTER();
  return create(made, compute, factor_type);
}

API cublasLtMatmulDescDestroy(Operation* one) {
  ENTER();
  return destroy(one);
}

API cublasLtMatmulDescSetAttribute(Operation* given, int attribute, const void* value, size_t bytes) {
  ENTER();
  const auto one = find(given);
  REQUIRE(one != nullptr, kInvalidValue);
  switch (attribute) {
    case 3: // CUBLASLT_MATMUL_DESC_TRANSA
      return set(&one->a_operation, value, bytes);
    case 4: // CUBLASLT_MATMUL_DESC_TRANSB
      return set(&one->b_operation, value, bytes);
    case 7: // CUBLASLT_MATMUL_DESC_EPILOGUE
      return set(&one->epilogue, value, bytes);
    case 8: // CUBLASLT_MATMUL_DESC_BIAS_POINTER
      return set(&one->bias, value, bytes);
    default:
      return kInvalidValue;
  }
}

API cublasLtMatrixLayoutCreate(Layout** made, int type, uint64_t rows, uint64_t columns, int64_t step) {
  ENTER();
  return create(made, type, rows, columns, step);
}

API cublasLtMatrixLayoutDestroy(Layout* one) {
  ENTER();
  return destroy(one);
}

API cublasLtMatrixLayoutSetAttribute(Layout* given, int attribute, const void* value, size_t bytes) {
  ENTER();
  const auto one = find(given);
  REQUIRE(one != nullptr, kInvalidValue);
  switch (attribute) {
    case 5: // CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT
      return set(&one->batch, value, bytes);
    case 6: // CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET
      return set(&one->batch_step, value, bytes);
    default:
      return kInvalidValue;
  }
}

API cublasLtMatmulPreferenceCreate(Preference** made) {
  ENTER();
  return create(made);
}

API cublasLtMatmulPreferenceDestroy(Preference* one) {
  ENTER();
  return destroy(one);
}

API cublasLtMatmulPreferenceSetAttribute(Preference* given, int attribute, const void* value, size_t bytes) {
  ENTER();
  const auto one = find(given);
  REQUIRE(one != nullptr, kInvalidValue);
  switch (attribute) {
    case 1: // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
      return set(&one->workspace, value, bytes);
    case 3: // CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK
      return set(&one->schemes, value, bytes);
    case 5: // CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, and those of B, C, D
    case 6:
    case 7:
    case 8:
      return set(&one->alignments[attribute - 5], value, bytes);
    default:
      return kInvalidValue;
  }
}

API cublasLtMatmulAlgoGetHeuristic(
    Handle* handle,
    Operation* operation_of,
    Layout* a_of,
    Layout* b_of,
    Layout* c_of,
    Layout* d_of,
    Preference* preference_of,
    int most,
    Found* found,
    int* count) {
  ENTER();
  const Use use(handle);
  RETURN_STATUS(use.status(kNotInitialized, kInternalError, kExecutionFailed));
  const auto operation = find(operation_of);
  const auto a = find(a_of), b = find(b_of), c = find(c_of), d = find(d_of);
  const auto preference = find(preference_of);
  REQUIRE(operation && a && b && c && d && preference && *c == *d && most > 0 && found && count, kInvalidValue);
  Product product;
  RETURN_STATUS(described(*operation, *a, *b, *c, &product));
  const size_t bytes = type_of(a->type)->bytes;
  const auto parts = static_cast<uint64_t>(2 * product.batch * product.m * product.n); // of sums that are divided
  *count = 0;
  const auto offer = [&](uint32_t scheme, uint64_t alignment, uint64_t workspace) {
    const bool divides = scheme != 0;
    if (*count < most && workspace <= preference->workspace && (!divides || product.k > 1) &&
        (preference->schemes & scheme) == scheme) {
      const Algorithm algorithm{fingerprint(*operation, *a, *b, *c), scheme, alignment, workspace, {}};
      found[(*count)++] = {algorithm, workspace, kSuccess, 1, {}};
    }
  };
  bool is_any_aligned = (operation->epilogue & kBias) == 0 || is_aligned(operation->bias, kAlignment);
  for (const uint32_t alignment : preference->alignments) {
    is_any_aligned = is_any_aligned && alignment % kAlignment == 0;
  }
  offer(kInOutputType, bytes, parts * bytes);
  if (is_any_aligned) {
    offer(0, kAlignment, 0);
  }
  offer(0, bytes, 0);
  offer(kInComputeType, bytes, parts * sizeof(double));
  offer(kInPlace, bytes, 1024);
  return *count == 0 ? kNotSupported : kSuccess;
}

API cublasLtMatmul(
    Handle* handle,
    Operation* operation_of,
    const void* alpha,
    const char* a_memory,
    Layout* a_of,
    const char* b_memory,
    Layout* b_of,
    const void* beta,
    const char* c_memory,
    Layout* c_of,
    char* d_memory,
    Layout* d_of,
    const Algorithm* algorithm,
    char* workspace,
    size_t workspace_bytes,
    CUstream stream) {
  ENTER();
  const Use use(handle);
  RETURN_STATUS(use.status(kNotInitialized, kInternalError, kExecutionFailed));
  const auto operation = find(operation_of);
  const auto a = find(a_of), b = find(b_of), c = find(c_of), d = find(d_of);
  REQUIRE(operation && a && b && c && d && alpha && beta && algorithm, kInvalidValue);
  REQUIRE(c_memory == d_memory && *c == *d, kNotSupported); // others are not emulated
  Product product;
  RETURN_STATUS(described(*operation, *a, *b, *c, &product));
  REQUIRE(algorithm->product == fingerprint(*operation, *a, *b, *c), kInvalidValue);
  REQUIRE(workspace_bytes >= algorithm->workspace, kInvalidValue);
  REQUIRE(workspace_bytes == 0 || is_device_memory(workspace, workspace_bytes), kInvalidValue);
  REQUIRE(is_aligned(workspace, kAlignment), kInvalidValue);
  const Type& type = *type_of(a->type);
  product.a.memory = a_memory;
  product.b.memory = b_memory;
  product.c.memory = d_memory;
  REQUIRE(is_valid(product, type.bytes), kInvalidValue);
  for (const char* const one : {a_memory, b_memory, c_memory}) {
    REQUIRE(is_aligned(one, algorithm->alignment), kInvalidValue);
  }
  if ((operation->epilogue & kBias) != 0) {
    product.bias = static_cast<const char*>(operation->bias);
    REQUIRE(is_device_memory(product.bias, static_cast<size_t>(product.m) * type.bytes), kInvalidValue);
    REQUIRE(is_aligned(product.bias, algorithm->alignment), kInvalidValue);
  }
  product.alpha = read(alpha, type, operation->compute);
  product.beta = read(beta, type, operation->compute);
  const bool rounds_parts = (algorithm->scheme & (kInPlace | kInOutputType)) != 0 && type.bytes == 2;
  product.what = operation->compute == kFloatInTf32 ? Rounded::kOperandsToTf32
      : operation->compute == kHalf                ? Rounded::kSums
      : rounds_parts                                ? Rounded::kHalvesOfSums
                                                    : Rounded::kNothing;
  const auto compute = type.product;
  return submit_call(stream, workspace, workspace_bytes, [product, compute] { compute(product); });
}
