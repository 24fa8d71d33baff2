// The part of NVML that reads sensors, as libnvidia-ml.so.1. Its GPUs are all of CUDA_EMULATOR_DEVICES, also those that
// CUDA_VISIBLE_DEVICES hides. Readings tell the GPUs apart: the temperature of GPU i is 40 + i, and so on.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "faults.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

enum Status : int {
  SUCCESS = 0,
  UNINITIALIZED = 1,
  INVALID_ARGUMENT = 2,
  NOT_SUPPORTED = 3,
  NO_PERMISSION = 4,
  NOT_FOUND = 6,
  GPU_IS_LOST = 15,
  UNKNOWN = 999,
};

struct Temperature {
  unsigned version;
  int sensor; // 0: the GPU
  int degrees;
};

struct Utilization {
  unsigned gpu, memory;
};

struct Memory {
  unsigned version;
  uint64_t total, reserved, free, used;
};

constexpr int kMostDevices = 7;
std::atomic<int> initialized{0};

unsigned version_of(size_t bytes, unsigned number) {
  return static_cast<unsigned>(bytes) | number << 24;
}

int count() {
  const char* text = getenv("CUDA_EMULATOR_DEVICES");
  return text == nullptr ? 2 : std::min(atoi(text), kMostDevices);
}

// Handles are ordinals from 1.
int ordinal(const void* device) {
  return static_cast<int>(reinterpret_cast<intptr_t>(device)) - 1;
}

int begin(const char* name) {
  const int fault = fault_of(name);
  return fault != 0 ? fault : initialized > 0 ? SUCCESS : UNINITIALIZED;
}

int begin(const char* name, const void* device, const void* result) {
  const int status = begin(name);
  const bool valid = ordinal(device) >= 0 && ordinal(device) < count() && result != nullptr;
  return status != SUCCESS ? status : valid ? SUCCESS : INVALID_ARGUMENT;
}

} // namespace

#define RETURN_ERROR(call)                              \
  if (const int status_ = (call); status_ != SUCCESS) { \
    return status_;                                     \
  }

API int nvmlInit_v2() {
  RETURN_ERROR(fault_of(__func__));
  ++initialized;
  return SUCCESS;
}

API const char* nvmlErrorString(int status) {
  switch (status) {
    case SUCCESS:
      return "Success";
    case UNINITIALIZED:
      return "Uninitialized";
    case INVALID_ARGUMENT:
      return "Invalid Argument";
    case NOT_SUPPORTED:
      return "Not Supported";
    case NO_PERMISSION:
      return "Insufficient Permissions";
    case NOT_FOUND:
      return "Not Found";
    case GPU_IS_LOST:
      return "GPU is lost";
    default:
      return "Unknown Error";
  }
}

// Accepts domain:bus:device.function and domain:bus:device in hexadecimal digits.
API int nvmlDeviceGetHandleByPciBusId_v2(const char* name, void** device) {
  RETURN_ERROR(begin(__func__));
  unsigned domain = 0, bus = 0, slot = 0;
  if (name == nullptr || device == nullptr || sscanf(name, "%x:%x:%x", &domain, &bus, &slot) != 3) {
    return INVALID_ARGUMENT;
  }
  if (domain != 0 || slot != 0 || bus == 0 || static_cast<int>(bus) > count()) {
    return NOT_FOUND;
  }
  *device = reinterpret_cast<void*>(static_cast<intptr_t>(bus)); // as in cuDeviceGetPCIBusId: the ordinal + 1
  return SUCCESS;
}

API int nvmlDeviceGetTemperatureV(void* device, Temperature* result) {
  RETURN_ERROR(begin(__func__, device, result));
  if (result->version != version_of(sizeof *result, 1) || result->sensor != 0) {
    return INVALID_ARGUMENT;
  }
  result->degrees = 40 + ordinal(device);
  return SUCCESS;
}

API int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) {
  RETURN_ERROR(begin(__func__, device, milliwatts));
  *milliwatts = 150'000 + static_cast<unsigned>(ordinal(device));
  return SUCCESS;
}

API int nvmlDeviceGetClockInfo(void* device, int clock, unsigned* megahertz) {
  RETURN_ERROR(begin(__func__, device, megahertz));
  constexpr unsigned kClocks[] = {1100, 1410, 1215, 1275}; // graphics, multiprocessors, memory, video
  if (clock < 0 || clock > 3) {
    return INVALID_ARGUMENT;
  }
  *megahertz = kClocks[clock] + static_cast<unsigned>(ordinal(device));
  return SUCCESS;
}

API int nvmlDeviceGetUtilizationRates(void* device, Utilization* percent) {
  RETURN_ERROR(begin(__func__, device, percent));
  *percent = {70 + static_cast<unsigned>(ordinal(device)), 20 + static_cast<unsigned>(ordinal(device))};
  return SUCCESS;
}

API int nvmlDeviceGetMemoryInfo_v2(void* device, Memory* memory) {
  RETURN_ERROR(begin(__func__, device, memory));
  if (memory->version != version_of(sizeof *memory, 2)) {
    return INVALID_ARGUMENT;
  }
  constexpr uint64_t kMiB = 1 << 20;
  const uint64_t used = (1000 + static_cast<uint64_t>(ordinal(device))) * kMiB, reserved = 500 * kMiB;
  *memory = {memory->version, 8192 * kMiB, reserved, 8192 * kMiB - used - reserved, used};
  return SUCCESS;
}
