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

# checked_index(errors, operator_number, index, size) of templates/errors.py, and errors of assertions.
REPORTS = f"""\
typedef int64 index_t;
#define WRAPS 0
{errors.FUNCTIONS}
FUNCTION index_t or_first(const index_t checked) {{ return checked < 0 ? 0 : checked; }}
FUNCTION void report(GLOBAL int* errors, const int text) {{
  if (atomic_swap(errors, 0u, {errors.REFUSED_VALUE}u) == 0u) errors[1] = text;
}}
"""

# After `scalar_words` of templates/random.py: a Philox key per graph, and a counter per element.
RANDOM = """\
FUNCTION float draw_uniform(const int64 seed, const int64 counter) {
  words_lanes words[4];
  philox(words, (uint64)seed, 0, (uint64)counter);
  return unit(words[0]);
}
FUNCTION float draw_normal(const int64 seed, const int64 counter) {
  words_lanes words[4];
  philox(words, (uint64)seed, 0, (uint64)counter);
  return sqrt(-2.0f * log(above_zero(words[0]))) * cos(6.2831853f * unit(words[1]));
}
FUNCTION int64 draw_integer(const int64 seed, const int64 counter, const int64 low, const int64 high) {
  words_lanes words[4];
  philox(words, (uint64)seed, 0, (uint64)counter);
  const uint64 draw = ((uint64)words[0] << 32) | (uint64)words[1];
  return low + (int64)(draw % ((uint64)high - (uint64)low));
}
"""
