// libcufft: Fourier transforms of contiguous host memory.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <complex>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device_library.h"

enum Result : int {
  kSuccess = 0,
  kInvalidPlan = 1,
  kInvalidValue = 4,
  kInternalError = 5,
  kExecFailed = 6,
  kInvalidSize = 8,
  kUnalignedData = 9,
  kInvalidDevice = 11,
  kNoWorkspace = 13,
  kNotImplemented = 14,
};

namespace {

using Number = std::complex<double>;

constexpr int kMostDimensions = 3;

struct Plan {
  CUcontext context = nullptr;
  bool is_made = false, is_automatic = true;
  bool is_double = false, reads_real = false, writes_real = false;
  std::vector<size_t> sizes; // the innermost last
  size_t batch = 0;
  CUstream stream = nullptr;
  char* workspace = nullptr;
  std::atomic<bool> destroyed{false};

  size_t elements() const {
    size_t count = 1;
    for (const size_t size : sizes) {
      count *= size;
    }
    return count;
  }
  size_t halves() const { // elements of a half spectrum
    return elements() / sizes.back() * (sizes.back() / 2 + 1);
  }
  size_t bytes(bool real, bool half) const { // of all elements of a side
    return batch * (half ? halves() : elements()) * (is_double ? sizeof(double) : sizeof(float)) * (real ? 1 : 2);
  }
  size_t in_bytes() const {
    return bytes(reads_real, writes_real);
  }
  size_t out_bytes() const {
    return bytes(writes_real, reads_real);
  }
  size_t workspace_bytes() const {
    return bytes(false, false);
  }
};

std::mutex mutex; // protects the following
std::map<int, std::shared_ptr<Plan>> plans;
int last_plan = 0;

std::shared_ptr<Plan> plan_of(int number) {
  const std::lock_guard lock(mutex);
  const auto at = plans.find(number);
  return at == plans.end() ? nullptr : at->second;
}

#define ENTER_PLAN(number)                            \
  ENTER();                                            \
  const std::shared_ptr<Plan> plan = plan_of(number); \
  REQUIRE(plan != nullptr, kInvalidPlan);             \
  REQUIRE(plan->context == current_context(), kInvalidDevice)

// The mixed-radix algorithm, which takes apart the smallest prime factor.
void transform_line(Number* out, const Number* in, size_t size, size_t stride, int direction) {
  if (size == 1) {
    *out = *in;
    return;
  }
  size_t prime = 2;
  while (size % prime != 0) {
    prime = prime * prime > size ? size : prime + 1;
  }
  const size_t part = size / prime;
  for (size_t i = 0; i < prime; ++i) {
    transform_line(out + i * part, in + i * stride, part, stride * prime, direction);
  }
  std::vector<Number> roots(size), all(size);
  for (size_t i = 0; i < size; ++i) {
    roots[i] = std::polar(1.0, direction * 2 * M_PI * static_cast<double>(i) / static_cast<double>(size));
  }
  for (size_t at = 0; at < size; ++at) {
    for (size_t i = 0; i < prime; ++i) {
      all[at] += roots[i * at % size] * out[i * part + at % part];
    }
  }
  std::copy(all.begin(), all.end(), out);
}

void transform_along(std::vector<Number>& all, size_t size, size_t inner, int direction) {
  std::vector<Number> from(size), to(size);
  for (size_t line = 0; line < all.size() / size; ++line) {
    Number* begin = &all[line / inner * inner * size + line % inner];
    for (size_t i = 0; i < size; ++i) {
      from[i] = begin[i * inner];
    }
    transform_line(to.data(), from.data(), size, 1, direction);
    for (size_t i = 0; i < size; ++i) {
      begin[i * inner] = to[i];
    }
  }
}

// The position of a half spectrum's element that is the conjugate of the one at a position of the whole spectrum.
size_t mirrored(const Plan& plan, size_t at) {
  const size_t last = plan.sizes.back(), outer = at / last;
  size_t found = 0, inner = 1, rest = outer;
  for (size_t d = plan.sizes.size() - 1; d-- > 0; inner *= plan.sizes[d], rest /= plan.sizes[d]) {
    const size_t index = rest % plan.sizes[d];
    found += (index == 0 ? 0 : plan.sizes[d] - index) * inner;
  }
  return found * (last / 2 + 1) + (last - at % last);
}

template <class T>
void execute(const Plan& plan, T* in, T* out, int direction) {
  const size_t last = plan.sizes.back(), half = last / 2 + 1;
  std::vector<Number> all(plan.elements());
  for (size_t i = 0; i < all.size(); ++i) {
    const bool is_mirrored = plan.writes_real && i % last >= half;
    const size_t from = !plan.writes_real ? i : is_mirrored ? mirrored(plan, i) : i / last * half + i % last;
    const Number read = plan.reads_real ? Number(in[from]) : Number(in[2 * from], in[2 * from + 1]);
    all[i] = is_mirrored ? std::conj(read) : read;
  }
  for (size_t d = plan.sizes.size(), inner = 1; d-- > 0; inner *= plan.sizes[d]) {
    transform_along(all, plan.sizes[d], inner, direction);
  }
  for (size_t i = 0; i < all.size(); ++i) {
    if (plan.reads_real && i % last >= half) {
      continue;
    }
    const size_t to = plan.reads_real ? i / last * half + i % last : i;
    if (plan.writes_real) {
      out[to] = static_cast<T>(all[i].real());
    } else {
      out[2 * to] = static_cast<T>(all[i].real());
      out[2 * to + 1] = static_cast<T>(all[i].imag());
    }
  }
}

void execute(const Plan& plan, char* in, char* out, char* workspace, int direction) {
  memset(workspace, 0xff, plan.workspace_bytes()); // it is not free for others
  if (plan.destroyed) { // too early: NaN
    memset(out, 0xff, plan.out_bytes());
    return;
  }
  const size_t in_bytes = plan.in_bytes() / plan.batch, out_bytes = plan.out_bytes() / plan.batch;
  for (size_t i = 0; i < plan.batch; ++i, in += in_bytes, out += out_bytes) {
    if (plan.is_double) {
      execute(plan, reinterpret_cast<double*>(in), reinterpret_cast<double*>(out), direction);
    } else {
      execute(plan, reinterpret_cast<float*>(in), reinterpret_cast<float*>(out), direction);
    }
    if (plan.writes_real) { // as NVIDIA's can
      memset(in, 0xff, in_bytes);
    }
  }
}

} // namespace

API cufftGetProperty(int which, int* value) {
  ENTER();
  return property(reinterpret_cast<void*>(&cufftGetProperty), which, value, kInvalidValue);
}

API cufftCreate(int* made) {
  ENTER();
  REQUIRE(made != nullptr, kInvalidValue);
  auto plan = std::make_shared<Plan>();
  plan->context = current_context();
  REQUIRE(plan->context != nullptr, kInvalidDevice);
  const std::lock_guard lock(mutex);
  plans[++last_plan] = plan;
  *made = last_plan;
  return kSuccess;
}

API cufftDestroy(int number) {
  ENTER_PLAN(number);
  REQUIRE(emulator_prepare() == CUDA_SUCCESS, kInternalError);
  plan->destroyed = true;
  const std::lock_guard lock(mutex);
  plans.erase(number);
  return kSuccess;
}

API cufftSetAutoAllocation(int number, int automatic) {
  ENTER_PLAN(number);
  plan->is_automatic = automatic != 0;
  return kSuccess;
}

API cufftXtMakePlanMany(
    int number,
    int rank,
    long long* sizes,
    long long* in_sizes,
    long long,
    long long,
    int in_type,
    long long* out_sizes,
    long long,
    long long,
    int out_type,
    long long batch,
    size_t* workspace,
    int compute) {
  ENTER_PLAN(number);
  REQUIRE(!plan->is_made, kInvalidPlan);
  REQUIRE(workspace != nullptr && rank >= 1 && rank <= kMostDimensions && batch >= 1, kInvalidValue);
  REQUIRE(in_sizes == nullptr && out_sizes == nullptr && !plan->is_automatic, kNotImplemented);
  REQUIRE(compute == 4 || compute == 5, kNotImplemented); // CUDA_C_32F, CUDA_C_64F
  const int real = compute - 4; // CUDA_R_32F, CUDA_R_64F
  REQUIRE((in_type == real || in_type == compute) && (out_type == real || out_type == compute), kInvalidValue);
  REQUIRE(in_type == compute || out_type == compute, kInvalidValue);
  REQUIRE(std::all_of(sizes, sizes + rank, [](long long size) { return size >= 1; }), kInvalidSize);
  REQUIRE(emulator_prepare() == CUDA_SUCCESS, kInternalError);
  plan->is_double = compute == 5;
  plan->reads_real = in_type == real;
  plan->writes_real = out_type == real;
  plan->sizes.assign(sizes, sizes + rank);
  plan->batch = static_cast<size_t>(batch);
  plan->is_made = true;
  *workspace = plan->workspace_bytes();
  return kSuccess;
}

API cufftSetStream(int number, CUstream stream) {
  ENTER_PLAN(number);
  plan->stream = stream;
  return kSuccess;
}

API cufftSetWorkArea(int number, char* workspace) {
  ENTER_PLAN(number);
  plan->workspace = workspace;
  return kSuccess;
}

API cufftXtExec(int number, char* in, char* out, int direction) {
  ENTER_PLAN(number);
  REQUIRE(plan->is_made, kInvalidPlan);
  REQUIRE(is_device_memory(plan->workspace, plan->workspace_bytes()), kNoWorkspace);
  REQUIRE(is_device_memory(in, plan->in_bytes()) && is_device_memory(out, plan->out_bytes()), kInvalidValue);
  REQUIRE(direction == -1 || direction == 1, kInvalidValue);
  const size_t complex_bytes = 2 * (plan->is_double ? sizeof(double) : sizeof(float));
  const auto is_aligned = [complex_bytes](void* at) { return reinterpret_cast<uintptr_t>(at) % complex_bytes == 0; };
  REQUIRE(is_aligned(in) && is_aligned(out), kUnalignedData);
  const bool is_real = plan->reads_real || plan->writes_real; // then the direction does not count
  const int sign = !is_real ? direction : plan->reads_real ? -1 : 1;
  const auto work = [plan, in, out, workspace = plan->workspace, sign] { execute(*plan, in, out, workspace, sign); };
  return submit(plan->stream, work) == CUDA_SUCCESS ? kSuccess : kExecFailed;
}
