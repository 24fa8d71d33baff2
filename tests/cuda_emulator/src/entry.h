// What each function of the API does first: injected faults, the state of the process, the current context.

#pragma once

#include "contexts.h"
#include "cuda_api.h"

#define API extern "C" __attribute__((visibility("default"))) CUresult

// Returns the error with which the call ends: an injected fault, or that the driver cannot be used (not initialized,
// a forked child, in a host function).
CUresult begin_call(const char* name);

// The same, and the sticky error of the current context, if there is one.
CUresult begin_call_unless_failed(const char* name);

// The same, and an error if there is no current context. Stores the current context.
CUresult begin_call(const char* name, std::shared_ptr<Context>* context);

#define RETURN_ERROR(call)                                      \
  if (const CUresult error_ = (call); error_ != CUDA_SUCCESS) { \
    return error_;                                              \
  }

#define REQUIRE(condition, error) \
  if (!(condition)) {             \
    return error;                 \
  }

#define ENTER() RETURN_ERROR(begin_call(__func__))
#define ENTER_UNLESS_FAILED() RETURN_ERROR(begin_call_unless_failed(__func__))
// Declares `context`.
#define ENTER_CONTEXT()             \
  std::shared_ptr<Context> context; \
  RETURN_ERROR(begin_call(__func__, &context))

// Counts a call, and returns the fault injected into it. Names in parentheses are not calls: «(kernel)» is the
// execution of a kernel.
CUresult injected_fault(const char* name);
