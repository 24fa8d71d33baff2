// Initialization, and what each call begins with. Names of errors are in errors.cpp.

#include "entry.h"

#include <pthread.h>

#include <cstdlib>

#include "faults.h"
#include "streams.h"

namespace {

std::atomic<bool> initialized{false}, forked{false};

} // namespace

CUresult injected_fault(const char* name) {
  return static_cast<CUresult>(fault_of(name));
}

CUresult begin_call(const char* name) {
  REQUIRE(!forked, CUDA_ERROR_NOT_INITIALIZED); // first: another thread of the parent can have held a lock
  RETURN_ERROR(injected_fault(name));
  REQUIRE(initialized, CUDA_ERROR_NOT_INITIALIZED);
  REQUIRE(!in_host_function(), CUDA_ERROR_NOT_PERMITTED);
  return CUDA_SUCCESS;
}

CUresult begin_call_unless_failed(const char* name) {
  RETURN_ERROR(begin_call(name));
  const auto context = current_context();
  return context == nullptr ? CUDA_SUCCESS : static_cast<CUresult>(context->error.load());
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
