#include "devices/compiled_kernel.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>

namespace backplane {

CompiledKernel::CompiledKernel(
    c10::DeviceIndex device_index, KernelSource source, std::vector<KernelParameter> parameters)
    : device_(checked_index(device_index)),
      entry_(source.entry),
      parameters_(std::move(parameters)),
      handle_(device(device_).compile(std::move(source))) {}

CompiledKernel::~CompiledKernel() {
  if (!in_bad_fork()) {
    device(device_).destroy_kernel(handle_);
  }
}

namespace {

template <typename T>
uint32_t store(T value, void* bytes) {
  std::memcpy(bytes, &value, sizeof(T));
  return sizeof(T);
}

} // namespace

uint32_t store_number(const c10::Scalar& number, c10::ScalarType dtype, void* bytes) {
  // On overflow integers wrap and floats become infinite, as in PyTorch's kernels; Scalar::to() would throw.
  const auto whole = [&]() -> uint64_t {
    return number.isFloatingPoint() ? static_cast<uint64_t>(static_cast<int64_t>(number.toDouble()))
        : number.isBoolean()        ? static_cast<uint64_t>(number.toBool())
        : number.isUnsigned()       ? number.toUInt64()
                                    : static_cast<uint64_t>(number.toLong());
  };
  switch (dtype) {
    case c10::kBool:
      return store<uint8_t>(number.isFloatingPoint() ? number.toDouble() != 0 : whole() != 0, bytes);
    case c10::kByte:
    case c10::kChar:
      return store(static_cast<uint8_t>(whole()), bytes);
    case c10::kShort:
    case c10::kUInt16:
      return store(static_cast<uint16_t>(whole()), bytes);
    case c10::kInt:
    case c10::kUInt32:
      return store(static_cast<uint32_t>(whole()), bytes);
    case c10::kLong:
    case c10::kUInt64:
      return store(whole(), bytes);
    case c10::kHalf:
      return store(c10::Half(static_cast<float>(number.toDouble())).x, bytes);
    case c10::kBFloat16:
      return store(c10::BFloat16(static_cast<float>(number.toDouble())).x, bytes);
    case c10::kFloat:
      return store(static_cast<float>(number.toDouble()), bytes);
    case c10::kDouble:
      return store(number.toDouble(), bytes);
    default:
      TORCH_CHECK_TYPE(false, "kernel parameters cannot have dtype ", dtype);
  }
}

void check_fits(const c10::Scalar& number, c10::ScalarType dtype) {
  switch (dtype) {
#define BACKPLANE_CONVERT(type, name)     \
  case c10::ScalarType::name:             \
    static_cast<void>(number.to<type>()); \
    break;
    AT_FORALL_SCALAR_TYPES_AND2(Half, BFloat16, BACKPLANE_CONVERT)
    BACKPLANE_CONVERT(bool, Bool)
    BACKPLANE_CONVERT(c10::complex<float>, ComplexFloat)
    BACKPLANE_CONVERT(c10::complex<double>, ComplexDouble)
    BACKPLANE_CONVERT(uint16_t, UInt16)
    BACKPLANE_CONVERT(uint32_t, UInt32)
    BACKPLANE_CONVERT(uint64_t, UInt64)
#undef BACKPLANE_CONVERT
    default:
      break;
  }
}

} // namespace backplane
