"""Functions of float32 for OpenCL devices that are CPUs, in text without branches.

A compiler for a CPU makes vectors of neighbouring work items, as long as all it meets is arithmetic. The libraries of
CPU implementations have them with branches or tables, one element at a time: up to 15 times slower.
"""

from __future__ import annotations

# The rational approximation of erf on [-4, 4] that Eigen uses (Eigen/src/Core/MathFunctionsImpl.h and
# unsupported/SpecialFunctions: coefficients only); relative error 4e-7, measured on a million normal numbers.
_ERF = """
FUNCTION float cpu_erf(const float x) {
  const float c = x > 4.0f ? 4.0f : x < -4.0f ? -4.0f : x;
  const float s = c * c;
  float p = -2.72614225801306e-10f;
  p = p * s + 2.77068142495902e-08f;
  p = p * s - 2.10102402082508e-06f;
  p = p * s - 5.69250639462346e-05f;
  p = p * s - 7.34990630306855e-04f;
  p = p * s - 2.95459980854025e-03f;
  p = p * s - 1.60960333262415e-02f;
  float q = -1.45660718464996e-05f;
  q = q * s - 2.13374055278905e-04f;
  q = q * s - 1.68282697438203e-03f;
  q = q * s - 7.37332916720468e-03f;
  q = q * s - 1.42647390514189e-02f;
  return c * (p / q); // in this order, c may be denormal
}
"""

# Moshier's Cephes (logf.c: method and coefficients): log(2^e m) with m in [sqrt(1/2), sqrt(2)).
_LOG = """
FUNCTION float cpu_log(const float x) {
  const bool tiny = x < 1.17549435e-38f;
  const int bits = as_int(tiny ? x * 8388608.0f : x);
  const float m = as_float((bits & 0x007fffff) | 0x3f800000);
  const bool high = m > 1.41421356f;
  const float e = (float)((bits >> 23) - 127 - (tiny ? 23 : 0) + (high ? 1 : 0));
  const float z = (high ? m * 0.5f : m) - 1.0f;
  const float s = z * z;
  float p = 7.0376836292e-2f;
  p = p * z - 1.1514610310e-1f;
  p = p * z + 1.1676998740e-1f;
  p = p * z - 1.2420140846e-1f;
  p = p * z + 1.4249322787e-1f;
  p = p * z - 1.6668057665e-1f;
  p = p * z + 2.0000714765e-1f;
  p = p * z - 2.4999993993e-1f;
  p = p * z + 3.3333331174e-1f;
  const float y = p * z * s - 2.12194440e-4f * e - 0.5f * s;
  const float result = z + y + 0.693359375f * e;
  return x == 0.0f ? -INFINITY : x < 0.0f ? NAN : x < INFINITY ? result : x;
}
"""

# Moshier's Cephes (expf.c: method and coefficients): 2^n e^r with |r| <= log(2) / 2. The power is taken in two steps,
# for results below the smallest normal number. Adding and subtracting 1.5 * 2^23 rounds to an integer.
_EXP = """
FUNCTION float cpu_exp(const float x) {
  const float c = x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x;
  const float n = (c * 1.44269504f + 12582912.0f) - 12582912.0f;
  const float r = (c - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float y = p * r * r + r + 1.0f;
  const int half_power = (int)n >> 1;
  const int rest = (int)n - half_power;
  const float result = y * as_float((half_power + 127) << 23) * as_float((rest + 127) << 23);
  return x == x ? result : x;
}
"""

# By the name of the library's function.
CPU_FUNCTIONS = {"erf": _ERF, "exp": _EXP, "log": _LOG}
