// libhiprtc: hiprtc's functions, by those of the emulated NVRTC.

#include <cstddef>
#include <string>
#include <vector>

#include "faults.h"

#define API extern "C" __attribute__((visibility("default"))) int

constexpr int kInvalidInput = 3, kInvalidOption = 5;

extern "C" {
const char* nvrtcGetErrorString(int);
int nvrtcCompileProgram(void*, int, const char* const*);
}

// A function that has the same parameters in NVRTC.
#define SAME(name, nvrtc, parameters, arguments) \
  extern "C" int nvrtc parameters;               \
  API name parameters {                          \
    if (const int fault = fault_of(__func__)) {  \
      return fault;                              \
    }                                            \
    return nvrtc arguments;                      \
  }

SAME(hiprtcCreateProgram, nvrtcCreateProgram,
     (void** made, const char* source, const char* name, int count, const char* const* headers,
      const char* const* names),
     (made, source, name, count, headers, names))
SAME(hiprtcDestroyProgram, nvrtcDestroyProgram, (void** program), (program))
SAME(hiprtcGetProgramLogSize, nvrtcGetProgramLogSize, (void* program, size_t* size), (program, size))
SAME(hiprtcGetProgramLog, nvrtcGetProgramLog, (void* program, char* log), (program, log))
SAME(hiprtcGetCodeSize, nvrtcGetCUBINSize, (void* program, size_t* size), (program, size))
SAME(hiprtcGetCode, nvrtcGetCUBIN, (void* program, char* code), (program, code))

extern "C" __attribute__((visibility("default"))) const char* hiprtcGetErrorString(int error) {
  static thread_local std::string text;
  text = std::string("HIPRTC") + (nvrtcGetErrorString(error) + 5); // for NVRTC
  return text.c_str();
}

API hiprtcVersion(int* major, int* minor) {
  if (major == nullptr || minor == nullptr) {
    return kInvalidInput;
  }
  *major = 9; // as in all versions of ROCm
  *minor = 0;
  return 0;
}

// The options are those of clang. The architecture must be the one of the emulated devices.
API hiprtcCompileProgram(void* program, int count, const char* const* given) {
  if (const int fault = fault_of(__func__)) {
    return fault;
  }
  std::vector<std::string> options;
  for (int i = 0; i < count; ++i) {
    const std::string one = given[i];
    if (one.rfind("--offload-arch=", 0) == 0) {
      if (one != "--offload-arch=gfx1100") {
        return kInvalidOption;
      }
      options.emplace_back("--gpu-architecture=sm_80");
    } else if (one != "-ffp-contract=off" && one != "-ffp-contract=fast") {
      options.push_back(one);
    }
  }
  std::vector<const char*> words;
  for (const std::string& one : options) {
    words.push_back(one.c_str());
  }
  return nvrtcCompileProgram(program, static_cast<int>(words.size()), words.data());
}
