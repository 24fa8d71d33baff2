"""Conversions between float16 or bfloat16 in memory and float32 in registers, in integer arithmetic.

For devices without conversion instructions. The text uses the common subset of the dialects and what each dialect's
header defines: FUNCTION (the qualifiers of a device function), uint, ushort, as_uint and as_float (the bits of a float,
and back).

Rounding is to nearest, ties to even. Infinity stays infinity. A NaN becomes quiet and keeps the upper bits of its
payload, as with CPU conversion instructions. All cases are computed and one is selected without branches, so that CPU
compilers can vectorize the code.
"""

FLOAT16 = """\
FUNCTION float float16_to_float(const ushort half_bits) {
  const uint sign = (uint)(half_bits & 0x8000u) << 16, magnitude = half_bits & 0x7fffu;
  // Below 2^-14 a float16 is a multiple of 2^-24.
  const uint small = as_uint((float)(int)magnitude * 0x1p-24f);
  const uint other = (magnitude << 13) + (magnitude < 0x7c00u ? 0x38000000u : 0x70000000u);
  const uint quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
  return as_float(sign | quiet | (magnitude < 0x400u ? small : other));
}

FUNCTION ushort float_to_float16(const float value) {
  const uint bits = as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  // Floats in [0.5, 1) are multiples of 2^-24, like float16 below 2^-14, so the addition rounds.
  const uint small = as_uint(as_float(magnitude) + 0.5f) - 0x3f000000u;
  const uint normal = (magnitude + 0xc8000fffu + (magnitude >> 13 & 1u)) >> 13;
  const uint finite = magnitude < 0x38800000u ? small : normal;
  const uint special = magnitude > 0x7f800000u ? 0x7e00u | (magnitude >> 13 & 0x3ffu) : 0x7c00u;
  return (ushort)(sign | (magnitude < 0x477ff000u ? finite : special));  // 65520 and more round to infinity
}
"""

BFLOAT16 = """\
FUNCTION float bfloat16_to_float(const ushort bits) { return as_float((uint)bits << 16); }

FUNCTION ushort float_to_bfloat16(const float value) {
  const uint bits = as_uint(value);
  const uint rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return (ushort)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}
"""
