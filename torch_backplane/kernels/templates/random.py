"""Random fills of contiguous tensors, and dropout, by Philox4x32-10.

Salmon et al., «Parallel random numbers: as easy as 1, 2, 3» (2011). The key is the generator's seed. The counter is
made of its offset, which names the call, and of the number of the element: what an element gets depends neither on the
launch nor on the device. An element takes one 32-bit word of the four that a counter gives, or two if it needs more.

A work item has LANES counters (`spelling`). Their first draws are one vector, their second draws the next one, and so
on: interleaved, they are those of neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.templates.source import Launch, LaunchSpec
from torch_backplane.kernels.templates.spelling import lane_count

# Of integers, an element has one word for ranges up to this one: the remainder makes some of them likelier than others,
# by the range's share of 2^32 at most. Powers of two have no such remainder.
NARROW_RANGE = 2**20

# How many words of the generator a call uses up: every element has a counter of its own within this.
WORDS_PER_CALL = 4

_SMALL_GROUP = 16

_PHILOX = """
FUNCTION void philox(words_lanes* words, const uint64 seed, const uint64 offset, const uint64 block) {
  uint key0 = (uint)seed, key1 = (uint)(seed >> 32);
  words_lanes c0 = (uint)block + EACH_LANE, c1 = (uint)(block >> 32);
  words_lanes c2 = (uint)(offset / 4), c3 = (uint)(offset / 4 >> 32);
  const words_lanes multiplier0 = 0xD2511F53u, multiplier1 = 0xCD9E8D57u;
  for (int round = 0; round < 10; ++round) {
    const words_lanes high0 = multiply_high(multiplier0, c0), low0 = multiplier0 * c0;
    const words_lanes high1 = multiply_high(multiplier1, c2), low1 = multiplier1 * c2;
    c0 = high1 ^ c1 ^ key0; c1 = low1; c2 = high0 ^ c3 ^ key1; c3 = low0;
    key0 += 0x9E3779B9u; key1 += 0xBB67AE85u;
  }
  words[0] = c0; words[1] = c1; words[2] = c2; words[3] = c3;
}
"""

# unit(draw): uniform in [0, 1), in steps of TO_ONE, the distance of the last one to 1; above_zero(draw): in (0, 1],
# with the bits that the type can hold.
_NARROW = """
#define TO_ONE ((value_t)0x1p-24f)
#define unit(draw) (TO_VALUE((draw) >> 8) * (value_t)0x1p-24f)
#define above_zero(draw) ((TO_VALUE(draw) + (value_t)1) * (value_t)0x1p-32f)
"""
_WIDE = """
#define TO_ONE ((value_t)(1.0 / 9007199254740992.0))
#define unit(draw) (TO_VALUE((draw) >> 11) * (value_t)(1.0 / 9007199254740992.0))
#define above_zero(draw) (TO_VALUE(((draw) >> 11) + 1) * (value_t)(1.0 / 9007199254740992.0))
"""

# x, what an element is, of its draw; input_here is what an input has for it. Those of _OF_PAIRS begin with an x.
DISTRIBUTIONS: Mapping[str, str] = {
    # Rounding, here and to the dtype in memory, may reach the upper end, which does not belong to it: from `third` on.
    "uniform": "x = first + unit(draw) * (second - first); x = x >= LANES_OF(third) ? LANES_OF(first) : x;",
    "normal": "x = first + second * x;",
    "log_normal": "x = exp(first + second * x);",
    # Zero does not belong to it: the logarithm of a draw that was rounded to one is that of the number before, and what
    # the rate makes smaller than `second` is that.
    "exponential": "x = fmax(fmax(-log(above_zero(draw)), LANES_OF(TO_ONE)) / first, LANES_OF(second));",
    # As far from either end, where it is infinite.
    "cauchy": "x = first + second * tan((value_t)3.141592653589793 * (unit(draw) - (value_t)0.5 + TO_ONE / 2));",
    "geometric": "x = fmax(ceil(log(above_zero(draw)) / log1p(-first)), LANES_OF(1));",
    "bernoulli": "x = above_zero(draw) <= LANES_OF(first) ? LANES_OF(1) : LANES_OF(0);",
    "bernoulli_each": "x = above_zero(draw) <= chance_here ? LANES_OF(1) : LANES_OF(0);",
}
# These are made in pairs, of two neighbours' draws, by Box and Muller.
_OF_PAIRS = frozenset({"normal", "log_normal"})
_PAIR = """
  const value_t_lanes radius{a} = sqrt((value_t)-2 * log(above_zero(draw{a})));
  const value_t_lanes angle{a} = (value_t)6.283185307179586 * unit(draw{b});
  const value_t_lanes x{a} = radius{a} * cos(angle{a}), x{b} = radius{a} * sin(angle{a});"""


def scalar_words(dialect: Dialect, value: torch.dtype) -> str:
    """Text before a kernel whose items draw words one by one: `philox(words, seed, offset, block)` fills four words,
    `above_zero(word)` is in (0, 1], as a value_t. It needs the types uint64 and int64.
    """
    return _words(dialect, value, wide=False, lanes=1) + _PHILOX + _NARROW


# Of the generator: seed and offset, as int64; offset is a multiple of 4 that no other call has.
Drawn = tuple[Any, Any]


class _Element(NamedTuple):
    """Statements for a vector of neighbours, what they compute in, the numbers that they know, and whether an element
    needs 64 bits; None: whether `value` has them.
    """

    text: str
    value: torch.dtype
    numbers: Mapping[str, tuple[torch.dtype, Any]]
    wide: bool | None = None


def fill(
    dialect: Dialect,
    out: torch.Tensor,
    distribution: str,
    drawn: Drawn,
    parameters: Sequence[Any] = (),
    chance: torch.Tensor | None = None,
) -> Launch:
    """Fills `out` with numbers of a distribution of DISTRIBUTIONS.

    Args:
        parameters: the distribution's: from, to and the least number that is `to` in memory, by itself `to` (uniform),
            mean and standard deviation, rate and the least result (exponential), median and scale (cauchy), chance
            (geometric, bernoulli).
        chance: for bernoulli_each, a number for each element, contiguous.
    """
    value = value_dtype(out.dtype) if facts(out.dtype).category == "float" else torch.float32
    inputs = {} if chance is None else {"chance": chance}
    first, second = [*parameters[:2], 0, 0][:2]
    third = parameters[2] if len(parameters) > 2 else second
    numbers = {"first": (value, first), "second": (value, second), "third": (value, third)}
    element = _Element(DISTRIBUTIONS[distribution], value, numbers)
    return _launch(distribution, dialect, {"out": (out, "x")}, inputs, element, drawn)


def dropout(
    dialect: Dialect, out: torch.Tensor, mask: torch.Tensor, self: torch.Tensor, kept: Any, scale: Any, drawn: Drawn
) -> Launch:
    """mask = true with the chance `kept`; out = self * scale where it is, else self * 0. All dense, in one order."""
    value = value_dtype(out.dtype)
    outputs = {"out": (out, "self_here * (x * scale)"), "mask": (mask, "x")}
    element = _Element(DISTRIBUTIONS["bernoulli"], value, {"first": (value, kept), "scale": (value, scale)})
    return _launch("dropout", dialect, outputs, {"self": self}, element, drawn, dense=True)


def fill_integers(dialect: Dialect, out: torch.Tensor, base: int, count: int, drawn: Drawn) -> Launch:
    """Fills `out` with integers from base to base + count - 1; count is at most 2^64, which takes all of a draw."""
    numbers: dict[str, tuple[torch.dtype, Any]] = {"base": (torch.int64, base), "range": (torch.uint64, count % 2**64)}
    text = "x = TO_VALUE(TO_INT64((range == 0 ? TO_UINT64(draw) : TO_UINT64(draw) % range) + (uint64)base));"
    element = _Element(text, value_dtype(out.dtype), numbers, wide=count > NARROW_RANGE and 2**32 % count != 0)
    return _launch("integers", dialect, {"out": (out, "x")}, {}, element, drawn)


def shuffle_equal(dialect: Dialect, out: torch.Tensor, keys: torch.Tensor, drawn: Drawn) -> Launch:
    """Exchanges the elements of `out` whose keys, which are in order, are equal: any order of theirs is as likely, by
    Fisher and Yates. Both of one dimension, contiguous.
    """
    return LaunchSpec(
        "shuffle_equal",
        dialect,
        outputs={"out": out},
        inputs={"keys": keys},
        integers={"count": out.numel()},
        numbers=_state(drawn),
        types={"uint64": torch.uint64, "int64": torch.int64},
        value=torch.int64,
        functions=scalar_words(dialect, torch.int64),
        body=_SHUFFLE,
        items=out.numel(),
    ).launch()


def _state(drawn: Drawn) -> dict[str, tuple[torch.dtype, Any]]:
    return {name: (torch.int64, one) for name, one in zip(("seed", "offset"), drawn, strict=True)}


def _launch(
    name: str,
    dialect: Dialect,
    outputs: Mapping[str, tuple[torch.Tensor, str]],
    inputs: Mapping[str, torch.Tensor],
    element: _Element,
    drawn: Drawn,
    *,
    dense: bool = False,
) -> Launch:
    """Args:
    outputs: tensors, and what is stored there after the element's statements.
    dense: the tensors are dense in any order, the same for all, and gone through as they lie in memory.
    """
    value = element.value
    wide = facts(value).bits == 64 if element.wide is None else element.wide
    lanes, draws = lane_count(dialect, value), 2 if wide else 4
    count = next(iter(outputs.values()))[0].numel()
    words = [f"TO_UINT64(words[{k}]) << 32 | TO_UINT64(words[{k + 1}])" for k in (0, 2)] if wide else _WORDS
    declared = [f"const draw_lanes draw{k} = {word};" for k, word in enumerate(words)]
    if name in _OF_PAIRS:
        declared += [_PAIR.format(a=k, b=k + 1) for k in range(0, draws, 2)]
        begin, vectors = "value_t_lanes x = {};", _interleaved("value_t_lanes", [f"x{k}" for k in range(draws)], lanes)
    else:
        begin = "const draw_lanes draw = {}; value_t_lanes x;"
        vectors = _interleaved("draw_lanes", [f"draw{k}" for k in range(draws)], lanes)
    reads = " ".join(_READ.replace("$", tensor) for tensor in inputs)
    writes = " ".join(_WRITE.replace("$", tensor).format(x=x) for tensor, (_, x) in outputs.items())
    steps = [
        f"{{ const index_t at = begin + {k * lanes}; {begin.format(vector)} {reads} {element.text} {writes} }}"
        for k, vector in enumerate(vectors)
    ]
    body = f"""
  const index_t begin = item * {draws} * LANES;
  words_lanes words[4];
  philox(words, (uint64)seed, (uint64)offset, (uint64)item * LANES);
  {" ".join(declared)}
  {"".join(steps)}
"""
    return LaunchSpec(
        f"random_{name}" + ("_wide" if wide else ""),
        dialect,
        outputs={tensor_name: tensor for tensor_name, (tensor, _) in outputs.items()},
        inputs=inputs,
        integers={"count": count},
        numbers={**element.numbers, **_state(drawn)},
        types={"uint64": torch.uint64, "int64": torch.int64},
        value=value,
        functions=_words(dialect, value, wide, lanes) + _PHILOX + (_WIDE if wide else _NARROW),
        body=body,
        items=-(-count // (draws * lanes)),
        group_size=dialect.target.small_group(_SMALL_GROUP),
        strided=[*outputs, *inputs] if dense else (),
    ).launch()


# The item of the first one of equal keys goes through them from the last one on.
_SHUFFLE = """
  if (item > 0 && load_keys(item - 1) == load_keys(item)) return;
  index_t last = item;
  while (last + 1 < count && load_keys(last + 1) == load_keys(item)) ++last;
  for (index_t at = last; at > item; --at) {
    words_lanes words[4];
    philox(words, (uint64)seed, (uint64)offset, (uint64)at);
    const index_t other = item + (index_t)(words[0] % (uint)(at - item + 1));
    const int64 kept = load_out(at);
    store_out(at, load_out(other));
    store_out(other, kept);
  }
"""

_WORDS = [f"words[{k}]" for k in range(4)]

# LANES elements of the tensor $ from `at` on, as many as there are.
_READ = """
  value_t_lanes $_here;
  if (at + LANES <= count) $_here = load_$_lanes(at);
  else {
    value_t few[LANES];
    for (int lane = 0; lane < LANES; ++lane) few[lane] = at + lane < count ? load_$(at + lane) : 0;
    $_here = lanes_put(few);
  }"""
_WRITE = """
  if (at + LANES <= count) store_$_lanes(at, ({x}));
  else {{
    value_t few[LANES];
    lanes_get({x}, few);
    for (int lane = 0; lane < LANES; ++lane) if (at + lane < count) store_$(at + lane, few[lane]);
  }}"""


def _interleaved(type_: str, names: Sequence[str], lanes: int) -> list[str]:
    """As many vectors as `names`: of the first lanes of those, then of their second ones, and so on."""
    if lanes == 1:
        return list(names)
    elements = [f"{name}.s{lane:x}" for lane in range(lanes) for name in names]
    return [f"({type_})({', '.join(elements[i : i + lanes])})" for i in range(0, len(elements), lanes)]


def _words(dialect: Dialect, value: torch.dtype, wide: bool, lanes: int) -> str:
    """The types of words and draws, and conversions between vectors of so many lanes."""
    conversions = {"VALUE": value, "INT64": torch.int64, "UINT64": torch.uint64}
    if lanes == 1:
        first = "0"
        lines = [f"#define TO_{name}(x) (({dialect.type(dtype)})(x))" for name, dtype in conversions.items()]
    else:
        first = f"(uint{lanes})({', '.join(map(str, range(lanes)))})"
        lines = [f"#define TO_{name}(x) convert_{dialect.type(dtype)}{lanes}(x)" for name, dtype in conversions.items()]
    suffix = str(lanes) if lanes > 1 else ""
    drawn = dialect.type(torch.uint64 if wide else torch.uint32)
    types = [f"typedef uint{suffix} words_lanes;", f"typedef {drawn}{suffix} draw_lanes;"]
    return "\n".join([*lines, *types, f"#define EACH_LANE {first}"])
