// cuGetProcAddress: entry points by name and version. cuGetExportTable: internal entry points, of which there are none.

#include <dlfcn.h>

#include <string>

#include "entry.h"

namespace {

// Names whose parameters differ between versions, and the exported function for a caller that was built with a version.
struct Versioned {
  const char* name;
  int version;
  const char* exported; // null: the emulator has no such function
};
const Versioned kVersioned[] = {
    // of one name, the latest version first
    {"cuCtxCreate", 12050, "cuCtxCreate_v4"},
    {"cuCtxCreate", 11040, nullptr},
    {"cuCtxCreate", 3020, "cuCtxCreate_v2"},
    {"cuCtxSynchronize", 13000, "cuCtxSynchronize_v2"},
    {"cuCtxSynchronize", 2000, "cuCtxSynchronize"},
    {"cuCtxGetDevice", 13000, "cuCtxGetDevice_v2"},
    {"cuCtxGetDevice", 2000, "cuCtxGetDevice"},
    {"cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"},
    {"cuStreamGetCaptureInfo", 11030, "cuStreamGetCaptureInfo_v2"},
    {"cuStreamGetCtx", 12050, nullptr},
    {"cuStreamGetCtx", 9020, "cuStreamGetCtx"},
    {"cuLaunchHostFunc", 13020, "cuLaunchHostFunc_v2"},
    {"cuLaunchHostFunc", 10000, "cuLaunchHostFunc"},
    {"cuStreamBeginCapture", 10010, "cuStreamBeginCapture_v2"},
    {"cuIpcOpenMemHandle", 11000, "cuIpcOpenMemHandle_v2"},
    {"cuStreamUpdateCaptureDependencies", 12030, "cuStreamUpdateCaptureDependencies_v2"},
    {"cuGraphGetEdges", 12030, "cuGraphGetEdges_v2"},
    {"cuGraphNodeGetDependencies", 12030, "cuGraphNodeGetDependencies_v2"},
    {"cuGraphNodeGetDependentNodes", 12030, "cuGraphNodeGetDependentNodes_v2"},
    {"cuGraphAddDependencies", 12030, "cuGraphAddDependencies_v2"},
    {"cuGraphRemoveDependencies", 12030, "cuGraphRemoveDependencies_v2"},
    {"cuGraphAddKernelNode", 12000, "cuGraphAddKernelNode_v2"},
    {"cuGraphKernelNodeGetParams", 12000, "cuGraphKernelNodeGetParams_v2"},
    {"cuGraphKernelNodeSetParams", 12000, "cuGraphKernelNodeSetParams_v2"},
    {"cuGraphExecKernelNodeSetParams", 12000, "cuGraphExecKernelNodeSetParams_v2"},
    {"cuGraphExecUpdate", 12000, "cuGraphExecUpdate_v2"},
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    {"cuGetProcAddress", 11030, "cuGetProcAddress"},
};

// The emulator's own library.
void* own_library() {
  static void* const library = [] {
    Dl_info info;
    dladdr(const_cast<Versioned*>(kVersioned), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  return library;
}

void* exported(const std::string& name) {
  return dlsym(own_library(), name.c_str());
}

void* entry_point(const std::string& name, int version) {
  bool is_versioned = false;
  for (const Versioned& one : kVersioned) {
    if (name == one.name) {
      is_versioned = true;
      if (version >= one.version) {
        return one.exported == nullptr ? nullptr : exported(one.exported);
      }
    }
  }
  if (is_versioned) {
    return nullptr;
  }
  for (const char* suffix : {"_v3", "_v2", ""}) {
    if (void* found = exported(name + suffix)) {
      return found;
    }
  }
  return nullptr;
}

constexpr uint64_t kPerThreadDefaultStream = 2;

} // namespace

API cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  RETURN_ERROR(injected_fault(__func__));
  REQUIRE(name != nullptr && function != nullptr && flags <= 2, CUDA_ERROR_INVALID_VALUE);
  *function = nullptr;
  REQUIRE(flags != kPerThreadDefaultStream, CUDA_ERROR_NOT_SUPPORTED);
  const bool is_own = std::string(name).rfind("cu", 0) == 0;
  *function = is_own ? entry_point(name, version) : nullptr;
  if (status != nullptr) {
    *status = *function == nullptr; // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND is 1
  }
  return *function == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

API cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

// NVIDIA's NVRTC calls this function, and does not check that libcuda has it.
API cuGetExportTable(const void** table, const void* identifier) {
  RETURN_ERROR(injected_fault(__func__));
  REQUIRE(table != nullptr && identifier != nullptr, CUDA_ERROR_INVALID_VALUE);
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}
