"""Functions and macros that kernels of compiled graphs use."""

from __future__ import annotations

import torch

from torch_backplane.kernels.templates import errors

# The dtypes of ATOMIC_ADD.
ATOMIC_DTYPES = frozenset({torch.float32, torch.int32})

ATOMIC_ADD = """\
#define ATOMIC_ADD(place, value, type, add) { \\
  const type addend = (value); uint before, after; GLOBAL uint* const word = (GLOBAL uint*)(place); \\
  do { before = *(volatile GLOBAL uint*)word; add } while (atomic_swap(word, before, after) != before); }
"""

REPORTS = f"""\
FUNCTION int64 checked_index(GLOBAL int* errors, const int operator_number, const int64 index, const int64 size) {{
  if (index >= 0 && index < size) return index;
  if (atomic_swap(errors, 0u, {errors.INDEX_OUT_OF_RANGE}u) == 0u) {{
    errors[1] = operator_number;
    errors[2] = (int)(index < -0x7fffffff ? -0x7fffffff : index > 0x7fffffff ? 0x7fffffff : index);
    errors[3] = (int)size;
  }}
  return 0;
}}
FUNCTION void report(GLOBAL int* errors, const int text) {{
  if (atomic_swap(errors, 0u, {errors.REFUSED_VALUE}u) == 0u) errors[1] = text;
}}
"""

# Philox 4x32-10 (Salmon et al. 2011): a key per graph and a counter per element.
RANDOM = """\
FUNCTION void draw_words(const uint64 seed, const uint64 counter, uint* words) {
  uint key0 = (uint)seed, key1 = (uint)(seed >> 32);
  uint c0 = (uint)counter, c1 = (uint)(counter >> 32), c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint high0 = multiply_high(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint high1 = multiply_high(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ key0; c1 = low1; c2 = high0 ^ c3 ^ key1; c3 = low0;
    key0 += 0x9E3779B9u; key1 += 0xBB67AE85u;
  }
  words[0] = c0; words[1] = c1; words[2] = c2; words[3] = c3;
}
FUNCTION float draw_uniform(const int64 seed, const int64 counter) {
  uint words[4];
  draw_words((uint64)seed, (uint64)counter, words);
  return (float)(words[0] >> 8) * 0x1p-24f;
}
FUNCTION float draw_normal(const int64 seed, const int64 counter) {
  uint words[4];
  draw_words((uint64)seed, (uint64)counter, words);
  const float radius = sqrt(-2.0f * log(((float)(words[0] >> 8) + 1.0f) * 0x1p-24f));
  return radius * cos(6.2831853f * ((float)(words[1] >> 8) * 0x1p-24f));
}
FUNCTION int64 draw_integer(const int64 seed, const int64 counter, const int64 low, const int64 high) {
  uint words[4];
  draw_words((uint64)seed, (uint64)counter, words);
  const uint64 draw = ((uint64)words[0] << 32) | (uint64)words[1];
  return low + (int64)(draw % ((uint64)high - (uint64)low));
}
"""
