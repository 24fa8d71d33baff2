// Devices, and their attributes.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>

#include "entry.h"

namespace {

size_t setting(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text == nullptr ? otherwise : strtoull(text, nullptr, 10);
}

// The devices of CUDA_EMULATOR_DEVICES that CUDA_VISIBLE_DEVICES names, as numbers. The first invalid one ends the
// list.
std::vector<Device*>* make_devices() {
  const size_t count = std::min<size_t>(setting("CUDA_EMULATOR_DEVICES", 2), kMostDevices);
  const size_t memory = setting("CUDA_EMULATOR_MEMORY", size_t{8} << 30);
  std::vector<Device*> all;
  for (size_t i = 0; i < count; ++i) {
    all.push_back(new Device);
    all.back()->ordinal = static_cast<int>(i);
    all.back()->memory = memory;
  }
  const char* names = getenv("CUDA_VISIBLE_DEVICES");
  if (names == nullptr) {
    return new std::vector<Device*>(all);
  }
  auto* visible = new std::vector<Device*>;
  std::istringstream items(names);
  for (std::string item; std::getline(items, item, ',');) {
    char* end;
    const long number = strtol(item.c_str(), &end, 10);
    if (end == item.c_str() || number < 0 || static_cast<size_t>(number) >= count) {
      break;
    }
    visible->push_back(all[static_cast<size_t>(number)]);
  }
  return visible;
}

// By number, as in CUdevice_attribute. Those that are not listed are 0: the feature is missing. 33 is the PCI bus.
const std::map<int, int>& attributes() {
  static const auto& all = *new std::map<int, int>{
      {1, 1024}, // threads per block
      {2, 1024}, // block sizes x
      {3, 1024}, // y
      {4, 64}, // z
      {5, 2147483647}, // grid sizes x
      {6, 65535}, // y
      {7, 65535}, // z
      {8, 48 << 10}, // shared memory per block
      {9, 64 << 10}, // constant memory
      {10, 32}, // warp
      {11, 2147483647}, // pitch
      {12, 65536}, // registers per block
      {13, 1410000}, // clock in kHz
      {14, 512}, // alignment of textures
      {15, 1}, // copies overlap with kernels
      {16, multiprocessors()}, // multiprocessors
      {19, 1}, // host memory can be mapped
      {31, 1}, // concurrent kernels
      {36, 1215000}, // memory clock in kHz
      {37, 5120}, // memory bus in bits
      {38, 40 << 20}, // L2 cache
      {39, 2048}, // threads per multiprocessor
      {40, 3}, // copy engines
      {41, 1}, // unified addresses
      {75, capability() / 10}, // compute capability, major
      {76, capability() % 10}, // minor
      {78, 1}, // stream priorities
      {79, 1}, // L1 cache of global memory
      {80, 1}, // of local memory
      {81, 164 << 10}, // shared memory per multiprocessor
      {82, 65536}, // registers per multiprocessor
      {86, 1}, // native atomics between host and device
      {87, 2}, // single to double precision
      {90, 1}, // compute preemption
      {91, 1}, // registered host memory at the same address
      {95, 1}, // cooperative launch
      {97, 163 << 10}, // shared memory per block, opt-in
      {99, 1}, // host memory can be registered
      {102, 1}, // virtual memory management
      {106, 32}, // blocks per multiprocessor
      {108, 30 << 20}, // persisting L2 cache
      {109, 1 << 30}, // access policy window
      {111, 1 << 10}, // shared memory reserved per block
      {120, capability() >= 90}, // clusters
      {125, 1}, // interprocess events
  };
  return all;
}

} // namespace

const std::vector<Device*>& devices() {
  static const std::vector<Device*>& all = *make_devices();
  return all;
}

Device* device_at(CUdevice number) {
  return number >= 0 && static_cast<size_t>(number) < devices().size() ? devices()[static_cast<size_t>(number)]
                                                                       : nullptr;
}

int number_of(const Device* device) {
  for (size_t i = 0; i < devices().size(); ++i) {
    if (devices()[i] == device) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

int multiprocessors() {
  static const int value = static_cast<int>(setting("CUDA_EMULATOR_UNITS", 4));
  return value;
}

int capability() {
  static const int value = static_cast<int>(setting("CUDA_EMULATOR_ARCHITECTURE", 80));
  return value;
}

API cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER();
  REQUIRE(device != nullptr, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(device_at(ordinal) != nullptr, CUDA_ERROR_INVALID_DEVICE);
  *device = ordinal;
  return CUDA_SUCCESS;
}

API cuDeviceGetCount(int* count) {
  ENTER();
  REQUIRE(count != nullptr, CUDA_ERROR_INVALID_VALUE);
  *count = static_cast<int>(devices().size());
  return CUDA_SUCCESS;
}

API cuDeviceGetName(char* name, int size, CUdevice number) {
  ENTER();
  REQUIRE(name != nullptr && size > 0, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(device_at(number) != nullptr, CUDA_ERROR_INVALID_DEVICE);
  snprintf(name, static_cast<size_t>(size), "Emulated CUDA device %d", device_at(number)->ordinal);
  return CUDA_SUCCESS;
}

API cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice number) {
  ENTER();
  REQUIRE(uuid != nullptr, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(device_at(number) != nullptr, CUDA_ERROR_INVALID_DEVICE);
  memcpy(uuid->bytes, "emulated device", 15);
  uuid->bytes[15] = static_cast<char>('0' + device_at(number)->ordinal);
  return CUDA_SUCCESS;
}

API cuDeviceTotalMem_v2(size_t* bytes, CUdevice number) {
  ENTER();
  REQUIRE(bytes != nullptr, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(device_at(number) != nullptr, CUDA_ERROR_INVALID_DEVICE);
  *bytes = device_at(number)->memory;
  return CUDA_SUCCESS;
}

API cuDeviceGetAttribute(int* value, int attribute, CUdevice number) {
  ENTER();
  REQUIRE(value != nullptr && attribute > 0 && attribute < 162, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(device_at(number) != nullptr, CUDA_ERROR_INVALID_DEVICE);
  const auto at = attributes().find(attribute);
  *value = attribute == 33 ? device_at(number)->ordinal + 1 : at == attributes().end() ? 0 : at->second;
  return CUDA_SUCCESS;
}

API cuDeviceComputeCapability(int* major, int* minor, CUdevice number) {
  ENTER();
  REQUIRE(major != nullptr && minor != nullptr, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(device_at(number) != nullptr, CUDA_ERROR_INVALID_DEVICE);
  *major = capability() / 10;
  *minor = capability() % 10;
  return CUDA_SUCCESS;
}

API cuDeviceGetPCIBusId(char* name, int size, CUdevice number) {
  ENTER();
  REQUIRE(name != nullptr && size > 12, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(device_at(number) != nullptr, CUDA_ERROR_INVALID_DEVICE);
  snprintf(name, static_cast<size_t>(size), "0000:%02X:00.0", device_at(number)->ordinal + 1);
  return CUDA_SUCCESS;
}

API cuDeviceGetByPCIBusId(CUdevice* device, const char* name) {
  ENTER();
  REQUIRE(device != nullptr && name != nullptr, CUDA_ERROR_INVALID_VALUE);
  unsigned domain = 0, bus = 0;
  REQUIRE(sscanf(name, "%x:%x:", &domain, &bus) == 2, CUDA_ERROR_INVALID_VALUE);
  for (size_t i = 0; i < devices().size(); ++i) {
    if (domain == 0 && devices()[i]->ordinal + 1 == static_cast<int>(bus)) {
      *device = static_cast<CUdevice>(i);
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

// --- peer access -----------------------------------------------------------------------------------------------------

API cuDeviceCanAccessPeer(int* possible, CUdevice number, CUdevice peer) {
  ENTER();
  REQUIRE(possible != nullptr, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(device_at(number) != nullptr && device_at(peer) != nullptr, CUDA_ERROR_INVALID_DEVICE);
  *possible = number != peer && setting("CUDA_EMULATOR_PEERS", 1) != 0;
  return CUDA_SUCCESS;
}

API cuDeviceGetP2PAttribute(int* value, int attribute, CUdevice number, CUdevice peer) {
  ENTER();
  REQUIRE(value != nullptr && attribute >= 1 && attribute <= 6 && number != peer, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(device_at(number) != nullptr && device_at(peer) != nullptr, CUDA_ERROR_INVALID_DEVICE);
  *value = setting("CUDA_EMULATOR_PEERS", 1) != 0 && attribute <= 3; // rank, access, atomics
  return CUDA_SUCCESS;
}

API cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  ENTER_CONTEXT();
  REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
  const auto other = find(peer);
  REQUIRE(other != nullptr && other != context, CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(other->device != context->device, CUDA_ERROR_INVALID_DEVICE);
  REQUIRE(setting("CUDA_EMULATOR_PEERS", 1) != 0, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
  const unsigned bit = 1u << other->device->ordinal;
  return (context->peers.fetch_or(bit) & bit) != 0 ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

API cuCtxDisablePeerAccess(CUcontext peer) {
  ENTER_CONTEXT();
  const auto other = find(peer);
  REQUIRE(other != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  const unsigned bit = 1u << other->device->ordinal;
  return (context->peers.fetch_and(~bit) & bit) == 0 ? CUDA_ERROR_PEER_ACCESS_NOT_ENABLED : CUDA_SUCCESS;
}
