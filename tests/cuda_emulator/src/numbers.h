// Numbers of the emulated libraries, which compute in double.

#pragma once

#include <complex>
#include <cstdint>
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
