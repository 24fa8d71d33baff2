"""Random fills of contiguous tensors, by Philox4x32-10.

Salmon et al., «Parallel random numbers: as easy as 1, 2, 3» (2011). The key is the generator's seed. The counter is
made of its offset, which names the call, and of the number of the element: what an element gets depends neither on the
launch nor on the device. An element takes one 32-bit word of the four that a counter gives, or two if it needs more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.templates.source import GROUP_SIZE, Call, make_call

# How many words of the generator a call uses up: every element has a counter of its own within this.
WORDS_PER_CALL = 4

_PHILOX = """
FUNCTION void philox(uint* words, const uint64 seed, const uint64 offset, const uint64 block) {
  uint key0 = (uint)seed, key1 = (uint)(seed >> 32);
  uint c0 = (uint)block, c1 = (uint)(block >> 32), c2 = (uint)(offset / 4), c3 = (uint)(offset / 4 >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint high0 = multiply_high(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint high1 = multiply_high(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ key0; c1 = low1; c2 = high0 ^ c3 ^ key1; c3 = low0;
    key0 += 0x9E3779B9u; key1 += 0xBB67AE85u;
  }
  words[0] = c0; words[1] = c1; words[2] = c2; words[3] = c3;
}
"""

# unit(n): uniform in [0, 1), of the words from n on; above_zero(n): in (0, 1]. With the bits that the type can hold.
_NARROW = """
#define unit(n) ((value_t)(words[n] >> 8) * (value_t)0x1p-24f)
#define above_zero(n) (((value_t)words[n] + 1) * (value_t)0x1p-32f)
#define bits(n) ((uint64)words[n])
"""
_WIDE = """
#define bits(n) ((uint64)words[n] << 32 | words[(n) + 1])
#define unit(n) ((value_t)(bits(n) >> 11) * (value_t)(1.0 / 9007199254740992.0))
#define above_zero(n) ((value_t)((bits(n) >> 11) + 1) * (value_t)(1.0 / 9007199254740992.0))
"""

# What an element is, of its words from `word` on; `pair` is the first word of the pair of elements that it belongs to.
DISTRIBUTIONS: Mapping[str, str] = {
    # Rounding may reach the upper end, which does not belong to it.
    "uniform": "const value_t x = first + unit(word) * (second - first); drawn = x >= second ? first : x;",
    "normal": """
      const value_t radius = sqrt((value_t)-2 * log(above_zero(pair)));
      const value_t angle = (value_t)6.283185307179586 * unit(pair + STEP);
      drawn = first + second * (radius * (word == pair ? cos(angle) : sin(angle)));""",
    "log_normal": """
      const value_t radius = sqrt((value_t)-2 * log(above_zero(pair)));
      const value_t angle = (value_t)6.283185307179586 * unit(pair + STEP);
      drawn = exp(first + second * (radius * (word == pair ? cos(angle) : sin(angle))));""",
    "exponential": "drawn = -log(above_zero(word)) / first;",
    "cauchy": "drawn = first + second * tan((value_t)3.141592653589793 * (unit(word) - (value_t)0.5));",
    "geometric": "drawn = ceil(log(above_zero(word)) / log1p(-first)); if (drawn < 1) drawn = 1;",
    "bernoulli": "drawn = unit(word) < first ? 1 : 0;",
    "bernoulli_each": "drawn = unit(word) < (value_t)load_chance(element) ? 1 : 0;",
}
_INTEGERS = "store_out(element, (int64)((range == 0 ? bits(word) : bits(word) % range) + (uint64)base));"


def fill(
    dialect: Dialect,
    out: torch.Tensor,
    distribution: str,
    seed: Any,
    offset: Any,
    first: Any = 0,
    second: Any = 0,
    chance: torch.Tensor | None = None,
) -> Call:
    """Fills `out` with numbers of a distribution of DISTRIBUTIONS.

    Args:
        seed, offset: of the generator, as int64; offset is a multiple of 4 that no other call has.
        first, second: the distribution's parameters: from and to (uniform), mean and standard deviation, rate
            (exponential), median and scale (cauchy), chance (geometric, bernoulli).
        chance: for bernoulli_each, a number for each element, contiguous.
    """
    is_float = facts(out.dtype).kind == "float"
    value = value_dtype(out.dtype) if is_float else torch.float32
    return _call(
        distribution,
        dialect,
        out,
        DISTRIBUTIONS[distribution] + " store_out(element, drawn);",
        value,
        facts(value).bits == 64,
        {} if chance is None else {"chance": chance},
        {"first": (value, first), "second": (value, second)},
        seed,
        offset,
    )


def fill_integers(dialect: Dialect, out: torch.Tensor, base: int, count: int, seed: Any, offset: Any) -> Call:
    """Fills `out` with integers from base to base + count - 1; count is at most 2^64."""
    wide = count > 2**32
    range_ = count % 2**64
    numbers: dict[str, tuple[torch.dtype, Any]] = {
        "base": (torch.int64, base),
        "range": (torch.uint64, range_),
    }
    value = value_dtype(out.dtype)
    return _call("integers", dialect, out, _INTEGERS, value, wide, {}, numbers, seed, offset)


def _call(
    name: str,
    dialect: Dialect,
    out: torch.Tensor,
    draw: str,
    value: torch.dtype,
    wide: bool,
    inputs: dict[str, torch.Tensor],
    numbers: dict[str, tuple[torch.dtype, Any]],
    seed: Any,
    offset: Any,
) -> Call:
    step = 2 if wide else 1
    per_item = 4 // step
    declared = "" if name == "integers" else "value_t drawn;"
    body = f"""
  const index_t item = (index_t)GROUP * {GROUP_SIZE} + ITEM;
  if (item * {per_item} >= count) return;
  uint words[4];
  philox(words, (uint64)seed, (uint64)offset, (uint64)item);
  for (int k = 0; k < {per_item}; ++k) {{
    const index_t element = item * {per_item} + k;
    if (element >= count) return;
    const int word = k * {step}, pair = word / (2 * {step}) * (2 * {step});
    {declared}
    {draw}
  }}
"""
    return make_call(
        f"random_{name}" + ("_wide" if wide else ""),
        dialect,
        outputs={"out": out},
        inputs=inputs,
        integers={"count": out.numel()},
        numbers={**numbers, "seed": (torch.int64, seed), "offset": (torch.int64, offset)},
        types={"uint64": torch.uint64, "int64": torch.int64},
        constants={"STEP": step},
        value=value,
        functions=_PHILOX + (_WIDE if wide else _NARROW),
        body=body,
        groups=-(-out.numel() // (per_item * GROUP_SIZE)),
    )
