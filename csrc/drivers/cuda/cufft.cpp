#include "drivers/cuda/cufft.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <mutex>

#include "drivers/cuda/cuda_calls.h"
#include "drivers/cuda/cuda_launcher.h"
#include "drivers/lru_cache.h"

namespace backplane::cuda {
namespace {

// From cufft.h and library_types.h, whose enums are ints. A cufftHandle is an int, too.
constexpr int kForward = -1, kInverse = 1;
constexpr int kNoWorkspace = 13; // CUFFT_NO_WORKSPACE
constexpr size_t kMaxPlans = 1024; // by default

// clang-format off
#define BACKPLANE_CUFFT_FUNCTIONS(FUNCTION) \
  FUNCTION(cufftCreate, (int* plan)) \
  FUNCTION(cufftDestroy, (int plan)) \
  FUNCTION(cufftSetAutoAllocation, (int plan, int automatic)) \
  FUNCTION(cufftXtMakePlanMany, ( \
    int plan, int rank, long long* sizes, long long* in_sizes, long long in_stride, long long in_step, int in_type, \
    long long* out_sizes, long long out_stride, long long out_step, int out_type, long long batch, size_t* workspace, \
    int compute)) \
  FUNCTION(cufftSetStream, (int plan, void* stream)) \
  FUNCTION(cufftSetWorkArea, (int plan, void* workspace)) \
  FUNCTION(cufftXtExec, (int plan, void* in, void* out, int direction))
// clang-format on

struct CufftApi {
#define BACKPLANE_CUFFT_MEMBER(name, parameters) int(*name) parameters = nullptr;
  BACKPLANE_CUFFT_FUNCTIONS(BACKPLANE_CUFFT_MEMBER)
#undef BACKPLANE_CUFFT_MEMBER
};
CufftApi cufft;

struct Precision {
  const char* name; // PyTorch's
  int real, complex; // cudaDataType
};
constexpr std::array<Precision, 2> kPrecisions{{{"float32", 0, 4}, {"float64", 1, 5}}};

enum Kind : int64_t { kComplex = 0, kRealToHalf = 1, kHalfToReal = 2 };

// The key of a plan.
struct Shape {
  size_t type; // in kPrecisions
  int64_t kind, batch, outer, middle, inner;
  auto operator<=>(const Shape&) const = default;
};

// A plan of cuFFT. The device's context is current when it is used. It must be destroyed by destroy().
class Plan : public std::enable_shared_from_this<Plan> {
 public:
  int workspace(const Shape& shape, size_t* bytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const int status = build(shape);
    *bytes = workspace_;
    return status;
  }

  int transform(const Shape& shape, void* queue, const CArgument* arguments, int direction) {
    const std::lock_guard<std::mutex> guard(mutex_); // stream and workspace are set for each call
    int status = build(shape);
    if (status == 0 && *static_cast<const int64_t*>(arguments[9].data) < static_cast<int64_t>(workspace_)) {
      status = kNoWorkspace;
    }
    status = status != 0 ? status : cufft.cufftSetStream(plan_, queue);
    status = status != 0 ? status : cufft.cufftSetWorkArea(plan_, arguments[8].memory);
    int capture = 0;
    void* graph = nullptr;
    if (status == 0) {
      status = -api.cuStreamGetCaptureInfo_v2(queue, &capture, nullptr, &graph, nullptr, nullptr);
    }
    if (status == 0 && capture == kCaptureActive) {
      status = keep_for(graph); // while the graph is captured, it cannot be destroyed
    }
    if (status != 0) {
      return status;
    }
    status = cufft.cufftXtExec(plan_, arguments[1].memory, arguments[0].memory, direction);
    if (capture != kCaptureNone) {
      return status;
    }
    const int noted = note_use(queue); // also after a failure: part of the work can be pending
    return status != 0 ? status : noted;
  }

  // Destroys cuFFT's plan and returns true, unless the device still uses it.
  bool destroy() {
    for (const auto& [queue, event] : uses_) {
      if (api.cuEventQuery(event) == kNotReady) {
        return false;
      }
    }
    for (const auto& [queue, event] : uses_) {
      static_cast<void>(api.cuEventDestroy_v2(event));
    }
    if (is_built_) {
      static_cast<void>(cufft.cufftDestroy(plan_));
    }
    return true;
  }

 private:
  int build(const Shape& shape) {
    if (is_built_) {
      return 0;
    }
    int plan = 0;
    if (const int status = cufft.cufftCreate(&plan)) {
      return status;
    }
    long long sizes[3];
    int rank = 0;
    for (const int64_t size : {shape.outer, shape.middle, shape.inner}) {
      if (size > 1) { // with fewer than three dimensions, the outer sizes are 1
        sizes[rank++] = size;
      }
    }
    const Precision& type = kPrecisions[shape.type];
    const int in = shape.kind == kRealToHalf ? type.real : type.complex;
    const int out = shape.kind == kHalfToReal ? type.real : type.complex;
    const OutsideCapture allocates;
    int status = cufft.cufftSetAutoAllocation(plan, 0);
    if (status == 0) { // without sizes of the memory, both sides are contiguous
      status = cufft.cufftXtMakePlanMany(
          plan, rank, sizes, nullptr, 1, 1, in, nullptr, 1, 1, out, shape.batch, &workspace_, type.complex);
    }
    if (status != 0) {
      static_cast<void>(cufft.cufftDestroy(plan));
      return status;
    }
    plan_ = plan;
    is_built_ = true;
    return 0;
  }

  // Makes a CUDA graph a user of this plan. A reference is released when the graph, its copies, and the instantiated
  // graphs are destroyed, and their launches are complete.
  int keep_for(void* graph) {
    auto user = std::make_unique<std::shared_ptr<Plan>>(shared_from_this());
    const auto release = [](void* given) { delete static_cast<std::shared_ptr<Plan>*>(given); };
    void* object = nullptr;
    if (const int status = api.cuUserObjectCreate(&object, user.get(), release, 1, kNoDestructorSync)) {
      return -status;
    }
    static_cast<void>(user.release()); // `release` owns it
    const int status = api.cuGraphRetainUserObject(graph, object, 1, kMoveUserObject);
    if (status != 0) {
      static_cast<void>(api.cuUserObjectRelease(object, 1));
    }
    return -status;
  }

  // Records an event after the use, because cuFFT does not tell when the plan can be destroyed.
  int note_use(void* queue) {
    auto use = std::find_if(uses_.begin(), uses_.end(), [queue](const auto& one) { return one.first == queue; });
    if (use == uses_.end()) {
      void* event = nullptr;
      if (const int status = api.cuEventCreate(&event, kDisableTiming)) {
        return -status;
      }
      use = uses_.insert(use, {queue, event});
    }
    return -api.cuEventRecord(use->second, queue);
  }

  std::mutex mutex_;
  int plan_ = 0;
  bool is_built_ = false;
  size_t workspace_ = 0; // bytes
  std::vector<std::pair<void*, void*>> uses_; // queues, each with the event after the last use
};

// The plans of a device.
class Plans {
 public:
  static Plans& of(size_t index) {
    static auto& all = *new std::array<Plans, kMostDevices>; // never destroyed: cuFFT can be unloaded before
    return all.at(index);
  }

  std::shared_ptr<Plan> get(const Shape& shape) {
    return cache.get(shape, [this] {
      return std::shared_ptr<Plan>(new Plan, [this](Plan* plan) { // must not call CUDA: can be in a thread of CUDA
        const std::lock_guard<std::mutex> guard(mutex_);
        evicted_.emplace_back(plan);
      });
    });
  }

  // Destroys the evicted plans that the device does not use any more. Holds no lock meanwhile, because that can wait
  // for host functions on the device, which can use other plans.
  void destroy_evicted(size_t index) {
    std::vector<std::unique_ptr<Plan>> plans;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      plans.swap(evicted_);
    }
    if (plans.empty()) {
      return;
    }
    static_cast<void>(call_in_context(index, [&plans] {
      const OutsideCapture frees;
      plans.erase(std::remove_if(plans.begin(), plans.end(), [](auto& one) { return one->destroy(); }), plans.end());
      return 0;
    }));
    const std::lock_guard<std::mutex> guard(mutex_);
    std::move(plans.begin(), plans.end(), std::back_inserter(evicted_));
  }

  LruCache<Shape, Plan> cache{kMaxPlans};

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Plan>> evicted_; // the device can still use them
};

// The arguments of the family fft (docs/driver-contract.md), with a workspace.
int run_transform(size_t index, size_t type, void* queue, const CArgument* arguments) {
  const auto integer = [arguments](int i) { return *static_cast<const int64_t*>(arguments[2 + i].data); };
  const Shape shape{type, integer(0), integer(2), integer(3), integer(4), integer(5)};
  const int direction = integer(1) != 0 ? kInverse : kForward;
  const int status = call_in_context(
      index, [&] { return Plans::of(index).get(shape)->transform(shape, queue, arguments, direction); });
  Plans::of(index).destroy_evicted(index);
  return status;
}

// A routine has no argument for the device and the dtype, so each pair has a separate function.
template <size_t index, size_t type>
int transform(void* queue, const CArgument* arguments, uint64_t) {
  return run_transform(index, type, queue, arguments);
}

template <size_t... pairs>
constexpr std::array<LibraryRoutine, sizeof...(pairs)> all_transforms(std::index_sequence<pairs...>) {
  return {&transform<pairs / kPrecisions.size(), pairs % kPrecisions.size()>...};
}
constexpr auto kTransforms = all_transforms(std::make_index_sequence<kMostDevices * kPrecisions.size()>());

} // namespace

std::vector<std::string> cufft_functions() {
#define BACKPLANE_CUFFT_NAME(name, parameters) #name,
  return {BACKPLANE_CUFFT_FUNCTIONS(BACKPLANE_CUFFT_NAME)};
#undef BACKPLANE_CUFFT_NAME
}

std::map<std::string, uintptr_t> cufft_transforms(const std::map<std::string, uintptr_t>& functions, size_t index) {
#define BACKPLANE_CUFFT_LOAD(name, parameters) \
  cufft.name = reinterpret_cast<decltype(cufft.name)>(function_of(functions, "cuFFT", #name));
  BACKPLANE_CUFFT_FUNCTIONS(BACKPLANE_CUFFT_LOAD)
#undef BACKPLANE_CUFFT_LOAD
  std::map<std::string, uintptr_t> found;
  for (size_t type = 0; type < kPrecisions.size(); ++type) {
    found[kPrecisions[type].name] = reinterpret_cast<uintptr_t>(kTransforms.at(index * kPrecisions.size() + type));
  }
  return found;
}

std::pair<int, size_t> cufft_workspace(
    size_t index, const std::string& dtype, int64_t kind, int64_t batch, const std::vector<int64_t>& sizes) {
  const auto type =
      std::find_if(kPrecisions.begin(), kPrecisions.end(), [&dtype](const auto& one) { return one.name == dtype; });
  TORCH_CHECK_VALUE(
      type != kPrecisions.end() && sizes.size() == 3, "cuFFT has no ", dtype, ", or there are not three sizes");
  const Shape shape{static_cast<size_t>(type - kPrecisions.begin()), kind, batch, sizes[0], sizes[1], sizes[2]};
  size_t bytes = 0;
  const int status = call_in_context(index, [&] { return Plans::of(index).get(shape)->workspace(shape, &bytes); });
  Plans::of(index).destroy_evicted(index);
  return {status, bytes};
}

size_t cufft_plans(size_t index) {
  return Plans::of(index).cache.size();
}

size_t cufft_max_plans(size_t index) {
  return Plans::of(index).cache.max_size();
}

void cufft_limit_plans(size_t index, size_t most) {
  Plans::of(index).cache.limit(most);
  Plans::of(index).destroy_evicted(index);
}

} // namespace backplane::cuda
