// Numbers of the emulated libraries, which compute in double.

#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdlib>
#include <cstring>

struct BFloat16 {
  uint16_t bits;
  operator double() const {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  static BFloat16 of(double value) {
    const auto narrow = static_cast<float>(value);
    uint32_t wide;
    memcpy(&wide, &narrow, sizeof wide);
    if (narrow != narrow) {
      return {0x7fc0};
    }
    return {static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)}; // to nearest even
  }
};

// Whether TF32 is used where it is allowed. NVIDIA's libraries read this variable, too.
inline bool uses_tf32() {
  const char* const given = getenv("NVIDIA_TF32_OVERRIDE");
  return given == nullptr || strcmp(given, "0") != 0;
}

// Rounds to TF32, which has 10 bits after the point and the exponents of float32.
inline double tf32(double value) {
  if (value == 0 || !std::isfinite(value)) {
    return value;
  }
  int exponent;
  const double fraction = std::frexp(value, &exponent); // 0.5 to 1
  return std::ldexp(std::nearbyint(std::ldexp(fraction, 11)), exponent - 11);
}
inline std::complex<double> tf32(std::complex<double> value) {
  return {tf32(value.real()), tf32(value.imag())};
}

template <class T>
T rounded(double value) {
  return static_cast<T>(value);
}
template <>
inline BFloat16 rounded<BFloat16>(double value) {
  return BFloat16::of(value);
}
template <class T>
T rounded(std::complex<double> value) {
  return T(value);
}
