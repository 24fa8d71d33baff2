// Contexts: primary ones and others, and each thread's stack of them.

#include "contexts.h"

#include <algorithm>

#include "entry.h"
#include "memory.h"
#include "modules.h"
#include "streams.h"

namespace {

thread_local std::vector<std::shared_ptr<Context>> stack;

std::shared_ptr<Context> make_context(Device* device, unsigned flags) {
  auto context = std::make_shared<Context>(device, flags);
  context->legacy = make_stream(context, 0, 0);
  Registry<Context>::all().add(context);
  return context;
}

// Ends a context. Its memory is freed, and its handles become invalid.
void destroy(const std::shared_ptr<Context>& context) {
  wait_for_all(*context);
  context->destroyed = true;
  const auto is_own = [&](const auto& one) { return one.context.lock() == context; };
  Registry<Stream>::all().remove_if([&](const Stream& one) {
    if (is_own(one)) {
      end_stream(one);
    }
    return is_own(one);
  });
  Registry<Event>::all().remove_if(is_own);
  Registry<Module>::all().remove_if(is_own);
  free_memory_of(*context);
  end_stream(*context->legacy);
  context->legacy = nullptr;
  Registry<Context>::all().remove(context.get());
}

constexpr unsigned kFlags = 0xff;

} // namespace

Context::Context(Device* of, unsigned given) : device(of), flags(given) {
  static std::atomic<unsigned long long> last{0};
  id = ++last;
}

std::shared_ptr<Context> current_context() {
  return stack.empty() ? nullptr : stack.back();
}

CurrentContext::CurrentContext(CUcontext context) {
  stack.push_back(find(context));
}

CurrentContext::~CurrentContext() {
  stack.pop_back();
}

// --- primary contexts ------------------------------------------------------------------------------------------------

API cuDevicePrimaryCtxRetain(CUcontext* made, CUdevice number) {
  ENTER();
  REQUIRE(made != nullptr, CUDA_ERROR_INVALID_VALUE);
  Device* device = device_at(number);
  REQUIRE(device != nullptr, CUDA_ERROR_INVALID_DEVICE);
  std::lock_guard lock(device->mutex);
  if (device->primary == nullptr) {
    device->primary = make_context(device, device->primary_flags);
  }
  ++device->retains;
  *made = device->primary.get();
  return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(CUdevice number) {
  ENTER();
  Device* device = device_at(number);
  REQUIRE(device != nullptr, CUDA_ERROR_INVALID_DEVICE);
  std::lock_guard lock(device->mutex);
  REQUIRE(device->retains != 0, CUDA_ERROR_INVALID_CONTEXT);
  if (--device->retains == 0) {
    destroy(device->primary);
    device->primary = nullptr;
  }
  return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxReset_v2(CUdevice number) {
  ENTER();
  Device* device = device_at(number);
  REQUIRE(device != nullptr, CUDA_ERROR_INVALID_DEVICE);
  std::lock_guard lock(device->mutex);
  if (device->primary != nullptr) {
    destroy(device->primary);
    device->primary = nullptr;
    device->retains = 0;
  }
  return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxSetFlags_v2(CUdevice number, unsigned flags) {
  ENTER();
  Device* device = device_at(number);
  REQUIRE(device != nullptr, CUDA_ERROR_INVALID_DEVICE);
  REQUIRE((flags & ~kFlags) == 0, CUDA_ERROR_INVALID_VALUE);
  std::lock_guard lock(device->mutex);
  device->primary_flags = flags;
  if (device->primary != nullptr) {
    device->primary->flags = flags;
  }
  return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxGetState(CUdevice number, unsigned* flags, int* active) {
  ENTER();
  Device* device = device_at(number);
  REQUIRE(device != nullptr, CUDA_ERROR_INVALID_DEVICE);
  REQUIRE(flags != nullptr && active != nullptr, CUDA_ERROR_INVALID_VALUE);
  std::lock_guard lock(device->mutex);
  *flags = device->primary_flags;
  *active = device->primary != nullptr;
  return CUDA_SUCCESS;
}

// --- other contexts --------------------------------------------------------------------------------------------------

API cuCtxCreate_v2(CUcontext* made, unsigned flags, CUdevice number) {
  ENTER();
  REQUIRE(made != nullptr && (flags & ~kFlags) == 0, CUDA_ERROR_INVALID_VALUE);
  Device* device = device_at(number);
  REQUIRE(device != nullptr, CUDA_ERROR_INVALID_DEVICE);
  stack.push_back(make_context(device, flags));
  *made = stack.back().get();
  return CUDA_SUCCESS;
}

API cuCtxCreate_v4(CUcontext* made, void* parameters, unsigned flags, CUdevice number) {
  REQUIRE(parameters == nullptr, CUDA_ERROR_NOT_SUPPORTED);
  return cuCtxCreate_v2(made, flags, number);
}

API cuCtxDestroy_v2(CUcontext handle) {
  ENTER();
  const auto context = find(handle);
  REQUIRE(context != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  for (Device* device : devices()) {
    std::lock_guard lock(device->mutex);
    REQUIRE(device->primary != context, CUDA_ERROR_INVALID_CONTEXT);
  }
  if (!stack.empty() && stack.back() == context) {
    stack.pop_back();
  }
  destroy(context);
  return CUDA_SUCCESS;
}

// --- the current context ---------------------------------------------------------------------------------------------

API cuCtxPushCurrent_v2(CUcontext handle) {
  ENTER();
  const auto context = find(handle);
  REQUIRE(context != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  stack.push_back(context);
  return CUDA_SUCCESS;
}

API cuCtxPopCurrent_v2(CUcontext* popped) {
  ENTER();
  REQUIRE(!stack.empty(), CUDA_ERROR_INVALID_CONTEXT);
  if (popped != nullptr) {
    *popped = stack.back().get();
  }
  stack.pop_back();
  return CUDA_SUCCESS;
}

API cuCtxSetCurrent(CUcontext handle) {
  ENTER();
  const auto context = find(handle);
  REQUIRE(context != nullptr || handle == nullptr, CUDA_ERROR_INVALID_CONTEXT);
  if (!stack.empty()) {
    stack.pop_back();
  }
  if (context != nullptr) {
    stack.push_back(context);
  }
  return CUDA_SUCCESS;
}

API cuCtxGetCurrent(CUcontext* handle) {
  ENTER();
  REQUIRE(handle != nullptr, CUDA_ERROR_INVALID_VALUE);
  *handle = stack.empty() ? nullptr : stack.back().get();
  return CUDA_SUCCESS;
}

API cuCtxGetDevice(CUdevice* number) {
  ENTER_CONTEXT();
  REQUIRE(number != nullptr, CUDA_ERROR_INVALID_VALUE);
  *number = number_of(context->device);
  return CUDA_SUCCESS;
}

API cuCtxGetFlags(unsigned* flags) {
  ENTER_CONTEXT();
  REQUIRE(flags != nullptr, CUDA_ERROR_INVALID_VALUE);
  *flags = context->flags;
  return CUDA_SUCCESS;
}

API cuCtxGetId(CUcontext handle, unsigned long long* id) {
  ENTER();
  const auto context = handle == nullptr ? current_context() : find(handle);
  REQUIRE(context != nullptr, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  REQUIRE(id != nullptr, CUDA_ERROR_INVALID_VALUE);
  *id = context->id;
  return CUDA_SUCCESS;
}

API cuCtxGetApiVersion(CUcontext handle, unsigned* version) {
  ENTER();
  const auto context = handle == nullptr ? current_context() : find(handle);
  REQUIRE(context != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(version != nullptr, CUDA_ERROR_INVALID_VALUE);
  *version = 3020;
  return CUDA_SUCCESS;
}

API cuCtxSynchronize() {
  ENTER_CONTEXT();
  RETURN_ERROR(refuse_during_capture());
  wait_for_all(*context);
  return context->status();
}

API cuCtxSynchronize_v2(CUcontext handle) {
  ENTER();
  const auto context = handle == nullptr ? current_context() : find(handle);
  REQUIRE(context != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  RETURN_ERROR(context->status());
  RETURN_ERROR(refuse_during_capture());
  wait_for_all(*context);
  return context->status();
}

API cuCtxGetDevice_v2(CUdevice* number, CUcontext handle) {
  ENTER();
  const auto context = handle == nullptr ? current_context() : find(handle);
  REQUIRE(context != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(number != nullptr, CUDA_ERROR_INVALID_VALUE);
  *number = number_of(context->device);
  return CUDA_SUCCESS;
}

API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER_CONTEXT();
  if (least != nullptr) {
    *least = kLeastPriority;
  }
  if (greatest != nullptr) {
    *greatest = kGreatestPriority;
  }
  return CUDA_SUCCESS;
}

namespace {

struct Limit {
  int number;
  size_t value;
};
// Stack, printf FIFO, heap of kernels, in bytes.
std::mutex limits_mutex;
Limit limits[] = {{0, 1024}, {1, 1 << 20}, {2, 8 << 20}};

Limit* limit_at(int number) {
  const auto at =
      std::find_if(std::begin(limits), std::end(limits), [&](const Limit& one) { return one.number == number; });
  return at == std::end(limits) ? nullptr : at;
}

} // namespace

API cuCtxGetLimit(size_t* value, int number) {
  ENTER_CONTEXT();
  REQUIRE(value != nullptr, CUDA_ERROR_INVALID_VALUE);
  std::lock_guard lock(limits_mutex);
  const Limit* limit = limit_at(number);
  REQUIRE(limit != nullptr, CUDA_ERROR_NOT_SUPPORTED);
  *value = limit->value;
  return CUDA_SUCCESS;
}

API cuCtxSetLimit(int number, size_t value) {
  ENTER_CONTEXT();
  std::lock_guard lock(limits_mutex);
  Limit* limit = limit_at(number);
  REQUIRE(limit != nullptr, CUDA_ERROR_NOT_SUPPORTED);
  limit->value = value;
  return CUDA_SUCCESS;
}
