#include "drivers/opencl/clblast.h"

#include <c10/util/Exception.h>

#include "drivers/native_launcher.h"

namespace backplane {
namespace {

// From clblast_c.h, whose enums are ints.
constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;

template <typename T>
using Product = int (*)(
    int layout,
    int a_transposed,
    int b_transposed,
    size_t m,
    size_t n,
    size_t k,
    T alpha,
    void* a,
    size_t a_offset,
    size_t a_row,
    void* b,
    size_t b_offset,
    size_t b_row,
    T beta,
    void* c,
    size_t c_offset,
    size_t c_row,
    void** queue,
    void** event);
template <typename T>
using Products = int (*)(
    int layout,
    int a_transposed,
    int b_transposed,
    size_t m,
    size_t n,
    size_t k,
    T alpha,
    void* a,
    size_t a_offset,
    size_t a_row,
    size_t a_step,
    void* b,
    size_t b_offset,
    size_t b_row,
    size_t b_step,
    T beta,
    void* c,
    size_t c_offset,
    size_t c_row,
    size_t c_step,
    size_t count,
    void** queue,
    void** event);

template <typename T>
struct Gemm {
  static inline Product<T> one = nullptr;
  static inline Products<T> many = nullptr;
};

template <typename T>
T number(const CArgument& argument) {
  return *static_cast<const T*>(argument.data);
}

// The arguments of the family matmul (docs/driver-contract.md).
template <typename T>
int product(void* queue, const CArgument* arguments, uint64_t count) {
  const CArgument &c = arguments[0], &a = arguments[1], &b = arguments[2];
  const T alpha = number<T>(arguments[3]), beta = number<T>(arguments[4]);
  const auto integer = [arguments](int index) { return static_cast<size_t>(number<int64_t>(arguments[5 + index])); };
  const size_t batch = integer(0), m = integer(1), n = integer(2), k = integer(3);
  const size_t c_row = integer(4), a_row = integer(5), b_row = integer(6);
  const int a_turned = integer(7) ? kTransposed : kPlain, b_turned = integer(8) ? kTransposed : kPlain;
  if (batch == 1) {
    return Gemm<T>::one(
        kRowMajor, a_turned, b_turned, m, n, k, alpha, a.memory, a.offset / sizeof(T), a_row, b.memory,
        b.offset / sizeof(T), b_row, beta, c.memory, c.offset / sizeof(T), c_row, &queue, nullptr);
  }
  return Gemm<T>::many(
      kRowMajor, a_turned, b_turned, m, n, k, alpha, a.memory, a.offset / sizeof(T), a_row, integer(10), b.memory,
      b.offset / sizeof(T), b_row, integer(11), beta, c.memory, c.offset / sizeof(T), c_row, integer(9), batch, &queue,
      nullptr);
}

template <typename T>
uintptr_t adapted(const std::map<std::string, uintptr_t>& functions, const std::string& letter) {
  const auto find = [&functions](const std::string& name) {
    const auto found = functions.find(name);
    TORCH_CHECK_VALUE(found != functions.end() && found->second != 0, "CLBlast's products need ", name);
    return found->second;
  };
  Gemm<T>::one = reinterpret_cast<Product<T>>(find("CLBlast" + letter + "gemm"));
  Gemm<T>::many = reinterpret_cast<Products<T>>(find("CLBlast" + letter + "gemmStridedBatched"));
  return reinterpret_cast<uintptr_t>(&product<T>);
}

} // namespace

std::map<std::string, uintptr_t> clblast_products(const std::map<std::string, uintptr_t>& functions) {
  return {{"float32", adapted<float>(functions, "S")}, {"float64", adapted<double>(functions, "D")}};
}

} // namespace backplane
