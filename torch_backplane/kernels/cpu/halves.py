"""Conversions between float16 in memory and float32 by CPU instructions."""

from __future__ import annotations

from torch_backplane.kernels.dialects.halves import FLOAT16

# For clang, which OpenCL implementations for CPUs are based on, where the CPU has F16C. The sign is handled separately:
# otherwise LLVM moves comparisons, negations and absolute values to the 16-bit values, where it does not vectorize
# them. Operands alternate between two versions: LLVM pairs two operands that are read the same way within an item, and
# then does not vectorize over items.
FLOAT16_BY_INSTRUCTIONS = f"""\
#ifdef __F16C__
FUNCTION float float16_to_float(const ushort half_bits) {{
  const uint magnitude = as_uint(__builtin_load_halff((const half*)&half_bits)) & 0x7fffffffu;
  return as_float(magnitude | (uint)(half_bits & 0x8000u) << 16);
}}

FUNCTION float odd_float16_to_float(const ushort half_bits) {{
  const ushort magnitude = half_bits & 0x7fffu;
  const uint bits = as_uint(__builtin_load_halff((const half*)&magnitude));
  return as_float(bits ^ (uint)(half_bits & 0x8000u) << 16);
}}

FUNCTION ushort float_to_float16(const float value) {{
  ushort half_bits;
  __builtin_store_halff(value, (half*)&half_bits);
  return (ushort)((half_bits & 0x7fffu) | (as_uint(value) >> 16 & 0x8000u));
}}
#else
#define odd_float16_to_float float16_to_float
{FLOAT16}#endif
"""
