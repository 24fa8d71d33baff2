// Copies and fills.

#include "copies.h"

#include <cstring>

#include "capture.h"
#include "entry.h"
#include "memory.h"

namespace {

bool is_known(uint64_t begin, uint64_t bytes) {
  return Memory::the().is_known(begin, bytes);
}

// Whether a range of the arena is not mapped any more.
bool is_gone(uint64_t begin, uint64_t bytes) {
  return Memory::the().is_in_arena(begin) && !is_known(begin, bytes);
}

uint64_t address(const void* at) {
  return reinterpret_cast<uint64_t>(at);
}

enum class Side { kHost, kDevice, kAny };

struct Transfer {
  uint64_t to, from;
  uint64_t bytes;
  Side to_side, from_side;
};

CUresult check(const Transfer& given) {
  REQUIRE(given.bytes == 0 || (given.to != 0 && given.from != 0), CUDA_ERROR_INVALID_VALUE);
  REQUIRE(given.to_side != Side::kDevice || is_known(given.to, given.bytes), CUDA_ERROR_INVALID_VALUE);
  REQUIRE(given.from_side != Side::kDevice || is_known(given.from, given.bytes), CUDA_ERROR_INVALID_VALUE);
  return CUDA_SUCCESS;
}

std::shared_ptr<Copy> copy_of(const Transfer& given) {
  auto copy = std::make_shared<Copy>();
  copy->to = given.to;
  copy->from = given.from;
  copy->bytes = given.bytes;
  CUDA_MEMCPY3D& node = copy->parameters;
  node.srcMemoryType = node.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  node.srcDevice = given.from;
  node.dstDevice = given.to;
  node.WidthInBytes = given.bytes;
  node.Height = node.Depth = 1;
  return copy;
}

CUresult copy_now(const std::shared_ptr<Context>& context, const Transfer& given) {
  RETURN_ERROR(check(given));
  return execute_now(context, copy_of(given));
}

// Host memory that is not pinned is read before the call returns, and written before it returns, as the driver does.
CUresult copy_later(const std::shared_ptr<Context>& context, const Transfer& given, CUstream handle) {
  const auto stream = stream_of(context, handle);
  REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE);
  RETURN_ERROR(check(given));
  const auto copy = copy_of(given);
  bool is_captured = false;
  RETURN_ERROR(capture_operation(stream, copy, &is_captured));
  if (is_captured) {
    return CUDA_SUCCESS;
  }
  if (!is_known(given.from, given.bytes)) {
    const auto* source = reinterpret_cast<const char*>(given.from);
    copy->staged.assign(source, source + given.bytes);
  }
  const bool returns_late = !is_known(given.to, given.bytes);
  const auto done = enqueue(stream, copy);
  if (returns_late) {
    done->wait();
    return stream->context.lock()->status();
  }
  return CUDA_SUCCESS;
}

} // namespace

CUresult Copy::execute(Context&) {
  const uint64_t source = staged.empty() ? from : address(staged.data());
  for (uint64_t plane = 0; plane < planes; ++plane) {
    for (uint64_t row = 0; row < rows; ++row) {
      const uint64_t row_to = to + plane * to_plane + row * to_pitch;
      const uint64_t row_from = source + plane * from_plane + row * from_pitch;
      REQUIRE(!is_gone(row_to, bytes) && !is_gone(row_from, bytes), CUDA_ERROR_ILLEGAL_ADDRESS);
      memmove(reinterpret_cast<void*>(row_to), reinterpret_cast<const void*>(row_from), bytes);
    }
  }
  return CUDA_SUCCESS;
}

CUresult Fill::execute(Context&) {
  for (size_t row = 0; row < parameters.height; ++row) {
    char* begin = reinterpret_cast<char*>(parameters.dst + row * parameters.pitch);
    REQUIRE(!is_gone(address(begin), parameters.width * parameters.elementSize), CUDA_ERROR_ILLEGAL_ADDRESS);
    if (parameters.elementSize == 1) {
      memset(begin, static_cast<int>(parameters.value), parameters.width);
      continue;
    }
    for (size_t i = 0; i < parameters.width; ++i) {
      memcpy(begin + i * parameters.elementSize, &parameters.value, parameters.elementSize);
    }
  }
  return CUDA_SUCCESS;
}

CUresult make_copy(const CUDA_MEMCPY3D& given, std::shared_ptr<Copy>* made) {
  const auto base = [](int type, const void* host, CUdeviceptr device) {
    return type == CU_MEMORYTYPE_HOST ? address(host) : device;
  };
  const auto known = [](int type) {
    return type == CU_MEMORYTYPE_HOST || type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED;
  };
  REQUIRE(known(given.srcMemoryType) && known(given.dstMemoryType), CUDA_ERROR_INVALID_VALUE);
  REQUIRE(given.WidthInBytes != 0 && given.Height != 0 && given.Depth != 0, CUDA_ERROR_INVALID_VALUE);
  auto copy = std::make_shared<Copy>();
  copy->parameters = given;
  copy->bytes = given.WidthInBytes;
  copy->rows = given.Height;
  copy->planes = given.Depth;
  copy->to_pitch = given.dstPitch != 0 ? given.dstPitch : given.WidthInBytes;
  copy->from_pitch = given.srcPitch != 0 ? given.srcPitch : given.WidthInBytes;
  copy->to_plane = copy->to_pitch * (given.dstHeight != 0 ? given.dstHeight : given.Height);
  copy->from_plane = copy->from_pitch * (given.srcHeight != 0 ? given.srcHeight : given.Height);
  copy->to = base(given.dstMemoryType, given.dstHost, given.dstDevice) + given.dstZ * copy->to_plane +
      given.dstY * copy->to_pitch + given.dstXInBytes;
  copy->from = base(given.srcMemoryType, given.srcHost, given.srcDevice) + given.srcZ * copy->from_plane +
      given.srcY * copy->from_pitch + given.srcXInBytes;
  const auto extent = [&](uint64_t plane, uint64_t pitch) {
    return (copy->planes - 1) * plane + (copy->rows - 1) * pitch + copy->bytes;
  };
  const auto fits = [&](int type, uint64_t at, uint64_t bytes) {
    return at != 0 && (type != CU_MEMORYTYPE_DEVICE || is_known(at, bytes));
  };
  REQUIRE(fits(given.dstMemoryType, copy->to, extent(copy->to_plane, copy->to_pitch)), CUDA_ERROR_INVALID_VALUE);
  REQUIRE(fits(given.srcMemoryType, copy->from, extent(copy->from_plane, copy->from_pitch)), CUDA_ERROR_INVALID_VALUE);
  *made = copy;
  return CUDA_SUCCESS;
}

CUresult make_fill(const CUDA_MEMSET_NODE_PARAMS& given, std::shared_ptr<Fill>* made) {
  const unsigned size = given.elementSize;
  REQUIRE(size == 1 || size == 2 || size == 4, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(given.dst % size == 0, CUDA_ERROR_INVALID_VALUE);
  const size_t bytes = given.width * size;
  REQUIRE(given.height <= 1 || (given.pitch >= bytes && given.pitch % size == 0), CUDA_ERROR_INVALID_VALUE);
  const size_t extent = given.height == 0 ? 0 : (given.height - 1) * given.pitch + bytes;
  REQUIRE(is_known(given.dst, extent), CUDA_ERROR_INVALID_VALUE);
  *made = std::make_shared<Fill>(given);
  return CUDA_SUCCESS;
}

// --- copies ----------------------------------------------------------------------------------------------------------

API cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  ENTER_CONTEXT();
  return copy_now(context, {to, from, bytes, Side::kAny, Side::kAny});
}

API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER_CONTEXT();
  return copy_later(context, {to, from, bytes, Side::kAny, Side::kAny}, stream);
}

API cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  ENTER_CONTEXT();
  return copy_now(context, {to, address(from), bytes, Side::kDevice, Side::kHost});
}

API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  ENTER_CONTEXT();
  return copy_later(context, {to, address(from), bytes, Side::kDevice, Side::kHost}, stream);
}

API cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  ENTER_CONTEXT();
  return copy_now(context, {address(to), from, bytes, Side::kHost, Side::kDevice});
}

API cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER_CONTEXT();
  return copy_later(context, {address(to), from, bytes, Side::kHost, Side::kDevice}, stream);
}

API cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  ENTER_CONTEXT();
  return copy_now(context, {to, from, bytes, Side::kDevice, Side::kDevice});
}

API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER_CONTEXT();
  return copy_later(context, {to, from, bytes, Side::kDevice, Side::kDevice}, stream);
}

API cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes) {
  ENTER_CONTEXT();
  REQUIRE(find(to_context) != nullptr && find(from_context) != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  return copy_now(context, {to, from, bytes, Side::kDevice, Side::kDevice});
}

API cuMemcpyPeerAsync(
    CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes, CUstream stream) {
  ENTER_CONTEXT();
  REQUIRE(find(to_context) != nullptr && find(from_context) != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  return copy_later(context, {to, from, bytes, Side::kDevice, Side::kDevice}, stream);
}

// --- fills -----------------------------------------------------------------------------------------------------------

#define FILLS(name, type)                                                                \
  API cuMemset##name##_v2(CUdeviceptr to, type value, size_t count) {                    \
    ENTER_CONTEXT();                                                                     \
    std::shared_ptr<Fill> fill;                                                          \
    RETURN_ERROR(make_fill({to, 0, value, sizeof(type), count, 1}, &fill));              \
    return execute_now(context, fill);                                                   \
  }                                                                                      \
  API cuMemset##name##Async(CUdeviceptr to, type value, size_t count, CUstream handle) { \
    ENTER_CONTEXT();                                                                     \
    const auto stream = stream_of(context, handle);                                      \
    REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE);                               \
    std::shared_ptr<Fill> fill;                                                          \
    RETURN_ERROR(make_fill({to, 0, value, sizeof(type), count, 1}, &fill));              \
    return submit(stream, fill);                                                         \
  }
FILLS(D8, unsigned char)
FILLS(D16, unsigned short)
FILLS(D32, unsigned)
