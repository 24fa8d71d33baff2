// Devices and contexts.

#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_api.h"
#include "registry.h"

struct Device {
  int ordinal = 0;
  size_t memory = 0;
  std::atomic<size_t> used{0};
  std::mutex mutex; // protects the following
  std::shared_ptr<Context> primary;
  unsigned retains = 0, primary_flags = 0;
};

struct Context {
  Context(Device* of, unsigned given);

  Device* device;
  std::atomic<unsigned> flags;
  unsigned long long id;
  std::atomic<int> error{CUDA_SUCCESS}; // sticky
  std::atomic<bool> destroyed{false};
  std::atomic<unsigned> peers{0}; // bits of the devices whose memory kernels can access
  std::mutex order; // held while work is submitted
  std::shared_ptr<Stream> legacy; // the default stream
  std::vector<std::weak_ptr<Stream>> streams;

  void fail(CUresult why) {
    int none = CUDA_SUCCESS;
    error.compare_exchange_strong(none, why);
  }
  CUresult status() const {
    return destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : static_cast<CUresult>(error.load());
  }
};

constexpr int kMostDevices = 7;

// The visible devices.
const std::vector<Device*>& devices();
// Returns null for an invalid number.
Device* device_at(CUdevice number);
int number_of(const Device* device);
// The compute capability of all devices, such as 80.
int capability();
// The number of multiprocessors of each device.
int multiprocessors();

// The calling thread's current context; null if there is none.
std::shared_ptr<Context> current_context();

// Makes a context current until the end of the scope.
class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context);
  ~CurrentContext();
};
