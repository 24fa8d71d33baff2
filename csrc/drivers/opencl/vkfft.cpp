#include "drivers/opencl/vkfft.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "drivers/lru_cache.h"
#include "drivers/native_launcher.h"

namespace backplane {
namespace {

// From cl.h.
constexpr uint32_t kQueueContext = 0x1090, kQueueDevice = 0x1091; // CL_QUEUE_CONTEXT, CL_QUEUE_DEVICE
constexpr uint32_t kDevicePlatform = 0x1031; // CL_DEVICE_PLATFORM
constexpr uint32_t kDeviceAlignment = 0x1019; // CL_DEVICE_MEM_BASE_ADDR_ALIGN, in bits
constexpr uint64_t kReadWrite = 1; // CL_MEM_READ_WRITE
constexpr uint32_t kRegion = 0x1220; // CL_BUFFER_CREATE_TYPE_REGION

struct Region { // cl_buffer_region
  size_t origin, size;
};

struct VkFFTFunctions {
  // pyvkfft's src/vkfft_opencl.cpp. -1: VkFFT chooses.
  void* (*make_config)(
      const long* sizes,
      size_t dimensions,
      void* buffer,
      void* buffer_out,
      void* platform,
      void* device,
      void* context,
      int normalizes,
      size_t bytes,
      int is_real,
      int dct,
      int dst,
      int disable_reorder,
      int register_boost,
      int use_lut,
      int keep_code,
      size_t batch,
      const long* skipped,
      int coalesced,
      int banks,
      int threads,
      int bandwidth_boost,
      int other_boost,
      int boost_of_four_steps,
      int warp,
      const long* grouped_batch,
      int force_callback);
  void* (*init_app)(const void* config, void* queue, int* status, size_t* scratch, long* bluestein, long* uploads);
  int (*fft)(void* application, void* in, void* out, void* queue);
  int (*ifft)(void* application, void* in, void* out, void* queue);
  void (*free_app)(void* application);
  void (*free_config)(void* config);
  // OpenCL.
  int (*queue_info)(void* queue, uint32_t name, size_t bytes, void* value, size_t* needed);
  int (*device_info)(void* device, uint32_t name, size_t bytes, void* value, size_t* needed);
  void* (*create_buffer)(void* context, uint64_t flags, size_t bytes, void* host, int* status);
  void* (*create_sub_buffer)(void* buffer, uint64_t flags, uint32_t kind, const Region* region, int* status);
  int (*copy)(
      void* queue,
      void* from,
      void* to,
      size_t from_offset,
      size_t to_offset,
      size_t bytes,
      uint32_t waits,
      void* const* wait_list,
      void** event);
  int (*release)(void* memory);
  size_t dimensions; // length of the arrays that are passed to make_config and init_app
};
VkFFTFunctions vkfft;

// A status other than 0. Positive ones are VkFFT's, negative ones OpenCL's.
struct Failed {
  int status;
};

void check(int status) {
  if (status != 0) {
    throw Failed{status};
  }
}

enum Kind : int64_t { kComplex = 0, kRealToComplex = 1, kComplexToReal = 2 };

// The key of an application.
struct Key {
  void* context;
  void* queue; // an application can run one transform at a time, so each queue has its own
  size_t bytes; // of a real number
  bool is_real;
  size_t batch;
  std::vector<long> sizes; // the innermost first
  auto operator<=>(const Key&) const = default;
};

class Application {
 public:
  ~Application() {
    // Pending transforms stay valid: OpenCL keeps memory and kernels until the commands that use them are complete.
    if (application_ != nullptr) {
      vkfft.free_app(application_);
    }
    if (config_ != nullptr) {
      vkfft.free_config(config_);
    }
  }

  void transform(const Key& key, void* device, bool inverse, void* in, void* out) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (application_ == nullptr) {
      build(key, device);
    }
    if (key.is_real && inverse) {
      std::swap(in, out); // the first argument is always the real side
    }
    check((inverse ? vkfft.ifft : vkfft.fft)(application_, in, out, key.queue));
  }

 private:
  void build(const Key& key, void* device) {
    void* platform = nullptr;
    check(vkfft.device_info(device, kDevicePlatform, sizeof(platform), &platform, nullptr));
    std::vector<long> sizes(vkfft.dimensions, 1), zeros(vkfft.dimensions, 0), unset(vkfft.dimensions, -1);
    std::copy(key.sizes.begin(), key.sizes.end(), sizes.begin());
    if (config_ == nullptr) {
      // Dummy buffers: that they differ means that transforms are not in place. The transform gets the actual ones.
      void *buffer = reinterpret_cast<void*>(1), *buffer_out = reinterpret_cast<void*>(2);
      config_ = vkfft.make_config(
          sizes.data(), key.sizes.size(), buffer, buffer_out, platform, device, key.context, 0, key.bytes, key.is_real,
          0, 0, -1, -1, -1, -1, key.batch, zeros.data(), -1, -1, -1, -1, -1, -1, -1, unset.data(), 0);
    }
    int status = 0;
    size_t scratch = 0;
    std::vector<long> bluestein(vkfft.dimensions), uploads(vkfft.dimensions);
    application_ = vkfft.init_app(config_, key.queue, &status, &scratch, bluestein.data(), uploads.data());
    check(status);
  }

  std::mutex mutex_;
  void* config_ = nullptr;
  void* application_ = nullptr;
};

using Applications = LruCache<Key, Application>;

Applications& applications() {
  static auto& all = *new Applications(128); // never destroyed: OpenCL can be unloaded before
  return all;
}

// Memory as a whole buffer, because VkFFT does not support offsets: the buffer itself, a sub-buffer, or a copy if the
// device does not allow a sub-buffer at the offset.
class WholeBuffer {
 public:
  WholeBuffer(const CArgument& given, size_t bytes, const Key& key, size_t alignment, bool is_read)
      : memory_(given.memory), given_(given), bytes_(bytes), queue_(key.queue) {
    if (given.offset == 0) {
      return;
    }
    int status = 0;
    if (given.offset % alignment == 0) {
      const Region region{given.offset, bytes};
      owned_ = vkfft.create_sub_buffer(given.memory, kReadWrite, kRegion, &region, &status);
    } else {
      owned_ = vkfft.create_buffer(key.context, kReadWrite, bytes, nullptr, &status);
      is_copy_ = true;
    }
    check(status);
    memory_ = owned_;
    if (is_copy_ && is_read) {
      const int copied = vkfft.copy(queue_, given.memory, memory_, given.offset, 0, bytes, 0, nullptr, nullptr);
      if (copied != 0) {
        vkfft.release(owned_); // the destructor does not run
        throw Failed{copied};
      }
    }
  }
  WholeBuffer(const WholeBuffer&) = delete;
  WholeBuffer& operator=(const WholeBuffer&) = delete;
  ~WholeBuffer() {
    if (owned_ != nullptr) {
      vkfft.release(owned_); // OpenCL keeps it until the commands that use it are complete
    }
  }

  void* memory() const {
    return memory_;
  }
  void write_back() const {
    if (is_copy_) {
      check(vkfft.copy(queue_, memory_, given_.memory, 0, given_.offset, bytes_, 0, nullptr, nullptr));
    }
  }

 private:
  void* memory_;
  void* owned_ = nullptr;
  bool is_copy_ = false;
  const CArgument& given_;
  const size_t bytes_;
  void* const queue_;
};

// The arguments of the family fft (docs/driver-contract.md).
template <typename T>
int transform(void* queue, const CArgument* arguments, uint64_t count) {
  const auto integer = [arguments](int index) { return *static_cast<const int64_t*>(arguments[2 + index].data); };
  const int64_t kind = integer(0), inverse = integer(1), batch = integer(2);
  try {
    Key key{nullptr, queue, sizeof(T), kind != kComplex, static_cast<size_t>(batch), {}};
    size_t outer = key.batch;
    for (int index = 5; index >= 3; --index) {
      if (integer(index) > 1) { // with fewer than three dimensions, the outer sizes are 1
        key.sizes.push_back(static_cast<long>(integer(index)));
        outer *= index < 5 ? static_cast<size_t>(integer(index)) : 1;
      }
    }
    void* device = nullptr;
    uint32_t alignment = 0;
    check(vkfft.queue_info(queue, kQueueContext, sizeof(key.context), &key.context, nullptr));
    check(vkfft.queue_info(queue, kQueueDevice, sizeof(device), &device, nullptr));
    check(vkfft.device_info(device, kDeviceAlignment, sizeof(alignment), &alignment, nullptr));

    const size_t last = static_cast<size_t>(integer(5));
    const size_t reals = outer * last * sizeof(T), half = outer * (last / 2 + 1) * 2 * sizeof(T);
    const size_t in_bytes = kind == kComplex ? 2 * reals : kind == kRealToComplex ? reals : half;
    const size_t out_bytes = kind == kComplex ? 2 * reals : kind == kRealToComplex ? half : reals;
    const size_t aligned = std::max<size_t>(1, alignment / 8);
    const WholeBuffer out(arguments[0], out_bytes, key, aligned, false), in(arguments[1], in_bytes, key, aligned, true);
    applications()
        .get(key, std::make_shared<Application>)
        ->transform(key, device, inverse != 0, in.memory(), out.memory());
    out.write_back();
    return 0;
  } catch (const Failed& failed) {
    return failed.status;
  }
}

} // namespace

std::map<std::string, uintptr_t> vkfft_transforms(
    const std::map<std::string, uintptr_t>& addresses, size_t dimensions) {
  TORCH_CHECK_VALUE(dimensions >= 3, "VkFFT's transforms need three dimensions, but have ", dimensions);
  const auto find = [&addresses](auto& function, const char* name) {
    const auto found = addresses.find(name);
    TORCH_CHECK_VALUE(found != addresses.end() && found->second != 0, "VkFFT's transforms need ", name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found->second);
  };
  find(vkfft.make_config, "make_config");
  find(vkfft.init_app, "init_app");
  find(vkfft.fft, "fft");
  find(vkfft.ifft, "ifft");
  find(vkfft.free_app, "free_app");
  find(vkfft.free_config, "free_config");
  find(vkfft.queue_info, "clGetCommandQueueInfo");
  find(vkfft.device_info, "clGetDeviceInfo");
  find(vkfft.create_buffer, "clCreateBuffer");
  find(vkfft.create_sub_buffer, "clCreateSubBuffer");
  find(vkfft.copy, "clEnqueueCopyBuffer");
  find(vkfft.release, "clReleaseMemObject");
  vkfft.dimensions = dimensions;
  return {
      {"float32", reinterpret_cast<uintptr_t>(&transform<float>)},
      {"float64", reinterpret_cast<uintptr_t>(&transform<double>)}};
}

size_t vkfft_applications() {
  return applications().size();
}

size_t vkfft_max_applications() {
  return applications().max_size();
}

void vkfft_limit_applications(size_t most) {
  applications().limit(most);
}

} // namespace backplane
