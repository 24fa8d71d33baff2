// Initialization, error names, injected faults.

#include "entry.h"

#include <pthread.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>

#include "streams.h"

namespace {

std::atomic<bool> initialized{false}, forked{false};

struct Fault {
  long remaining; // calls before it
  CUresult error;
};

struct Calls {
  std::mutex mutex;
  std::map<std::string, long> counts;
  std::multimap<std::string, Fault> faults;
};

// CUDA_EMULATOR_FAULTS=cuMemAlloc:1:2,cuLaunchKernel:3:719: the first cuMemAlloc fails with error 2, …
void read_faults(Calls& calls) {
  const char* setting = getenv("CUDA_EMULATOR_FAULTS");
  std::istringstream items(setting == nullptr ? "" : setting);
  for (std::string item; std::getline(items, item, ',');) {
    const size_t first = item.find(':'), second = item.find(':', first + 1);
    if (second == std::string::npos) {
      fprintf(stderr, "CUDA_EMULATOR_FAULTS: «%s» is not CALL:NUMBER:ERROR\n", item.c_str());
      abort();
    }
    const long number = std::stol(item.substr(first + 1)), error = std::stol(item.substr(second + 1));
    calls.faults.emplace(item.substr(0, first), Fault{number - 1, static_cast<CUresult>(error)});
  }
}

Calls& calls() {
  static Calls& all = *[] {
    auto* made = new Calls;
    read_faults(*made);
    return made;
  }();
  return all;
}

// The name without the suffix of its version: cuMemAlloc for cuMemAlloc_v2.
std::string plain(const char* name) {
  const char* end = strstr(name, "_v");
  return end == nullptr ? name : std::string(name, end);
}

#define ERRORS(of)                                                                                                              \
  of(SUCCESS, "no error") of(INVALID_VALUE, "invalid argument") of(OUT_OF_MEMORY, "out of memory") of(                          \
      NOT_INITIALIZED, "initialization error") of(DEINITIALIZED, "driver shutting down")                                        \
      of(NO_DEVICE, "no CUDA-capable device is detected") of(INVALID_DEVICE, "invalid device ordinal") of(                      \
          INVALID_IMAGE, "device kernel image is invalid") of(INVALID_CONTEXT, "invalid device context")                        \
          of(NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device") of(                                 \
              ECC_UNCORRECTABLE, "uncorrectable ECC error encountered")                                                         \
              of(PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices") of(                         \
                  INVALID_PTX, "a PTX JIT compilation failed") of(FILE_NOT_FOUND, "file not found")                             \
                  of(OPERATING_SYSTEM, "OS call failed or operation not supported on this OS") of(                              \
                      INVALID_HANDLE, "invalid resource handle")                                                                \
                      of(ILLEGAL_STATE, "the operation cannot be performed in the present state") of(                           \
                          NOT_FOUND, "named symbol not found") of(NOT_READY, "device not ready")                                \
                          of(ILLEGAL_ADDRESS, "an illegal memory access was encountered") of(                                   \
                              LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch")                               \
                              of(LAUNCH_TIMEOUT, "the launch timed out and was terminated") of(                                 \
                                  PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled")                                \
                                  of(PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled") of(                           \
                                      PRIMARY_CONTEXT_ACTIVE, "cannot set while device is active in this process")              \
                                      of(CONTEXT_IS_DESTROYED, "context is destroyed")                                          \
                                          of(ASSERT, "device-side assert triggered") of(                                        \
                                              HOST_MEMORY_ALREADY_REGISTERED,                                                   \
                                              "part or all of the requested memory range is already mapped")                    \
                                              of(HOST_MEMORY_NOT_REGISTERED,                                                    \
                                                 "pointer does not correspond to a registered memory region")                   \
                                                  of(MISALIGNED_ADDRESS, "misaligned address")                                  \
                                                      of(LAUNCH_FAILED, "unspecified launch failure") of(                       \
                                                          COOPERATIVE_LAUNCH_TOO_LARGE,                                         \
                                                          "too many blocks in cooperative launch")                              \
                                                          of(NOT_PERMITTED, "operation not permitted") of(                      \
                                                              NOT_SUPPORTED, "operation not supported")                         \
                                                              of(SYSTEM_NOT_READY, "system not yet initialized") of(            \
                                                                  STREAM_CAPTURE_UNSUPPORTED,                                   \
                                                                  "operation not permitted when stream is capturing")           \
                                                                  of(STREAM_CAPTURE_INVALIDATED,                                \
                                                                     "operation failed due to a previous error "                \
                                                                     "during capture")                                          \
                                                                      of(STREAM_CAPTURE_MERGE,                                  \
                                                                         "operation would result in a merge of "                \
                                                                         "separate capture sequences")                          \
                                                                          of(STREAM_CAPTURE_UNMATCHED,                          \
                                                                             "capture was not ended in the same "               \
                                                                             "stream as it began")                              \
                                                                              of(STREAM_CAPTURE_UNJOINED,                       \
                                                                                 "capturing stream has unjoined work")          \
                                                                                  of(STREAM_CAPTURE_ISOLATION,                  \
                                                                                     "dependency created on "                   \
                                                                                     "uncaptured work in another "              \
                                                                                     "stream")                                  \
                                                                                      of(STREAM_CAPTURE_IMPLICIT,               \
                                                                                         "operation would make the "            \
                                                                                         "legacy stream depend on a "           \
                                                                                         "capturing blocking stream")           \
                                                                                          of(CAPTURED_EVENT,                    \
                                                                                             "operation not "                   \
                                                                                             "permitted on an event "           \
                                                                                             "last recorded in a "              \
                                                                                             "capturing stream")                \
                                                                                              of(STREAM_CAPTURE_WRONG_THREAD,   \
                                                                                                 "attempt to "                  \
                                                                                                 "terminate a "                 \
                                                                                                 "thread-local "                \
                                                                                                 "capture sequence "            \
                                                                                                 "from another "                \
                                                                                                 "thread")                      \
                                                                                                  of(GRAPH_EXEC_UPDATE_FAILURE, \
                                                                                                     "the graph "               \
                                                                                                     "update was not "          \
                                                                                                     "performed "               \
                                                                                                     "because it "              \
                                                                                                     "included "                \
                                                                                                     "changes which "           \
                                                                                                     "violated "                \
                                                                                                     "constraints "             \
                                                                                                     "specific to "             \
                                                                                                     "instantiated "            \
                                                                                                     "graph update")            \
                                                                                                      of(UNKNOWN,               \
                                                                                                         "unknown "             \
                                                                                                         "error")

struct ErrorText {
  CUresult error;
  const char *name, *meaning;
};
#define ERROR_TEXT(name, meaning) {CUDA_ERROR_##name, "CUDA_ERROR_" #name, meaning},
constexpr CUresult CUDA_ERROR_SUCCESS = CUDA_SUCCESS;
const ErrorText kErrors[] = {ERRORS(ERROR_TEXT)};

CUresult error_text(CUresult error, const char** text, const char* ErrorText::* part) {
  REQUIRE(text != nullptr, CUDA_ERROR_INVALID_VALUE);
  for (const ErrorText& one : kErrors) {
    if (one.error == error) {
      *text = error == CUDA_SUCCESS && part == &ErrorText::name ? "CUDA_SUCCESS" : one.*part;
      return CUDA_SUCCESS;
    }
  }
  *text = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}

} // namespace

CUresult injected_fault(const char* name) {
  Calls& all = calls();
  std::lock_guard lock(all.mutex);
  const std::string key = plain(name);
  ++all.counts[key];
  const auto [begin, end] = all.faults.equal_range(key);
  for (auto at = begin; at != end; ++at) {
    if (at->second.remaining-- == 0) {
      const CUresult error = at->second.error;
      all.faults.erase(at);
      return error;
    }
  }
  return CUDA_SUCCESS;
}

CUresult begin_call(const char* name) {
  REQUIRE(!forked, CUDA_ERROR_NOT_INITIALIZED); // first: another thread of the parent can have held a lock
  RETURN_ERROR(injected_fault(name));
  REQUIRE(initialized, CUDA_ERROR_NOT_INITIALIZED);
  REQUIRE(!in_host_function(), CUDA_ERROR_NOT_PERMITTED);
  return CUDA_SUCCESS;
}

CUresult begin_call(const char* name, std::shared_ptr<Context>* context) {
  RETURN_ERROR(begin_call(name));
  *context = current_context();
  REQUIRE(*context != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  return (*context)->status();
}

API cuInit(unsigned flags) {
  REQUIRE(!forked, CUDA_ERROR_NOT_INITIALIZED);
  RETURN_ERROR(injected_fault(__func__));
  REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(!devices().empty(), CUDA_ERROR_NO_DEVICE);
  if (!initialized.exchange(true)) {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
  }
  return CUDA_SUCCESS;
}

API cuDriverGetVersion(int* version) {
  RETURN_ERROR(injected_fault(__func__));
  REQUIRE(version != nullptr, CUDA_ERROR_INVALID_VALUE);
  const char* setting = getenv("CUDA_EMULATOR_VERSION");
  *version = setting == nullptr ? 13000 : atoi(setting);
  return CUDA_SUCCESS;
}

API cuGetErrorName(CUresult error, const char** text) {
  return error_text(error, text, &ErrorText::name);
}

API cuGetErrorString(CUresult error, const char** text) {
  return error_text(error, text, &ErrorText::meaning);
}

// --- for tests -------------------------------------------------------------------------------------------------------

// Makes the n-th call from now (1: the next one) fail with an error. n = 0 removes the faults of the call.
extern "C" __attribute__((visibility("default"))) void emulator_inject_fault(const char* name, long number, int error) {
  std::lock_guard lock(calls().mutex);
  if (number == 0) {
    calls().faults.erase(plain(name));
    return;
  }
  calls().faults.emplace(plain(name), Fault{number - 1, static_cast<CUresult>(error)});
}

// Stores the names of all functions called so far, each with the number of its calls, one per line. Returns the length
// of the whole text; a text that does not fit is cut off.
extern "C" __attribute__((visibility("default"))) size_t emulator_calls(char* text, size_t size) {
  std::ostringstream all;
  {
    std::lock_guard lock(calls().mutex);
    for (const auto& [name, count] : calls().counts) {
      all << name << ' ' << count << '\n';
    }
  }
  const std::string made = all.str();
  if (size != 0) {
    text[made.copy(text, size - 1)] = '\0';
  }
  return made.size();
}
