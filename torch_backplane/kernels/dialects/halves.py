"""float16 and bfloat16 in memory, float32 in registers: conversions in integer arithmetic, for devices without them.

In the common subset of the dialects plus what each dialect's header defines: FUNCTION (how a device function begins),
uint, ushort, and as_uint / as_float (the bits of a float, and the float of these bits).
Rounding is to nearest, ties to even; NaN stays NaN and infinity infinity.
"""

FLOAT16 = """\
FUNCTION float float16_to_float(const ushort half_bits) {
  const uint sign = (uint)(half_bits & 0x8000u) << 16;
  const uint magnitude = half_bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Below 2^-14 a float16 is a multiple of 2^-24.
  if (magnitude < 0x400u) return as_float(sign | as_uint((float)magnitude * 0x1p-24f));
  return as_float(sign | ((magnitude << 13) + 0x38000000u));
}

FUNCTION ushort float_to_float16(const float value) {
  const uint sign = (as_uint(value) >> 16) & 0x8000u;
  uint magnitude = as_uint(value) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (ushort)(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return (ushort)(sign | 0x7c00u);  // 65520 is the first that rounds to infinity
  // Near 0.5 a float is a multiple of 2^-24, as a float16 below 2^-14 is: the addition rounds.
  if (magnitude < 0x38800000u) return (ushort)(sign | (as_uint(as_float(magnitude) + 0.5f) - 0x3f000000u));
  magnitude += 0xc8000fffu + ((magnitude >> 13) & 1u);
  return (ushort)(sign | magnitude >> 13);
}
"""

BFLOAT16 = """\
FUNCTION float bfloat16_to_float(const ushort bits) { return as_float((uint)bits << 16); }

FUNCTION ushort float_to_bfloat16(const float value) {
  const uint bits = as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (ushort)(bits >> 16 | 0x40u);
  return (ushort)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
"""
