"""Functions and macros that kernels of compiled graphs use."""

from __future__ import annotations

import torch

from torch_backplane.kernels.templates import errors
from torch_backplane.kernels.templates.random import NARROW_RANGE

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

# After `scalar_words` of templates/random.py. The seed is the Philox key. The lower ELEMENT_BITS of the counter are the
# number of the element, which uses one of the four words of its block, or two. The upper bits identify the call.
ELEMENT_BITS = 32
RANDOM = """\
FUNCTION void draw_words(words_lanes* words, const int64 seed, const int64 counter, const uint elements) {
  philox(words, (uint64)seed, (uint64)(uint)((uint64)counter >> 32) * 4, (uint64)((uint)counter / elements));
}
FUNCTION float draw_uniform(const int64 seed, const int64 counter) {
  words_lanes words[4];
  draw_words(words, seed, counter, 4);
  const uint low = counter & 1 ? words[1] : words[0], high = counter & 1 ? words[3] : words[2];
  return unit(counter & 2 ? high : low);
}
FUNCTION float draw_normal(const int64 seed, const int64 counter) {
  words_lanes words[4];
  draw_words(words, seed, counter, 4);
  const float radius = sqrt((value_t)-2 * log(above_zero(counter & 2 ? words[2] : words[0])));
  const float angle = (value_t)6.283185307179586 * unit(counter & 2 ? words[3] : words[1]);
  return radius * (counter & 1 ? sin(angle) : cos(angle));
}
FUNCTION int64 draw_integer(const int64 seed, const int64 counter, const int64 low, const int64 high) {
  words_lanes words[4];
  const uint64 range = (uint64)high - (uint64)low;
  uint64 draw;
  if (range == 0 || (range > NARROW_RANGE && ((uint64)1 << 32) % range != 0)) {
    draw_words(words, seed, counter, 2);
    draw = (uint64)(counter & 1 ? words[2] : words[0]) << 32 | (uint64)(counter & 1 ? words[3] : words[1]);
  } else {
    draw_words(words, seed, counter, 4);
    const uint even = counter & 2 ? words[2] : words[0], odd = counter & 2 ? words[3] : words[1];
    draw = (uint64)(counter & 1 ? odd : even);
  }
  return (int64)((uint64)low + (range == 0 ? draw : draw % range));
}
""".replace("NARROW_RANGE", f"{NARROW_RANGE}")
