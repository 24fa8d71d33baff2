"""Random fills of dense tensors, and dropout, by Philox4x32-10.

Salmon et al., «Parallel random numbers: as easy as 1, 2, 3» (2011). The key is the generator's seed. The counter
consists of the generator's offset, which identifies the call, and the number of the element in memory order. So the
value of an element depends neither on the launch nor on the device. A counter yields four 32-bit words. An element uses
one of them, or two if it needs more bits.

A work item has LANES counters (`spelling`). The first draws of all counters are one vector, the second draws another,
and so on. Interleaving these vectors yields the draws of consecutive elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.templates.source import Launch, LaunchSpec
from torch_backplane.kernels.templates.spelling import lane_count

# An integer uses one word if its range is not larger than this, or divides 2^32. In ranges that do not divide 2^32,
# some integers are more likely than others, by a relative difference of up to range / 2^32.
NARROW_RANGE = 2**20

# The increment of the generator's offset per call. The counters of a call differ by element, so this is enough for any
# number of elements.
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

# unit(draw) is uniform in [0, 1), a multiple of TO_ONE; the greatest value is 1 - TO_ONE. above_zero(draw) is uniform
# in (0, 1], with as many bits as the type can represent.
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

# Statements that compute an element x from its `draw`. NAME_here is the element of the input NAME. Statements of
# distributions in _OF_PAIRS start with a standard normal x instead.
DISTRIBUTIONS: Mapping[str, str] = {
    # Rounding, here or to the dtype in memory, can yield the excluded upper bound: for x from `third` on.
    "uniform": "x = first + unit(draw) * (second - first); x = x >= LANES_OF(third) ? LANES_OF(first) : x;",
    "normal": "x = first + second * x;",
    "log_normal": "x = exp(first + second * x);",
    # Zero is excluded. If a draw was rounded to 1, use the logarithm of the preceding number. If division by the rate
    # yields less than `second`, use `second`.
    "exponential": "x = fmax(fmax(-log(above_zero(draw)), LANES_OF(TO_ONE)) / first, LANES_OF(second));",
    # TO_ONE / 2 keeps the same distance from both ends of the interval, where the result is infinite.
    "cauchy": "x = first + second * tan((value_t)3.141592653589793 * (unit(draw) - (value_t)0.5 + TO_ONE / 2));",
    # The complement of the draw, so that large draws are large results, as in PyTorch's decomposition.
    "geometric": "x = fmax(ceil(log(above_zero(~draw)) / log1p(-first)), LANES_OF(1));",
    "bernoulli": "x = above_zero(draw) <= LANES_OF(first) ? LANES_OF(1) : LANES_OF(0);",
    "bernoulli_each": "x = above_zero(draw) <= chance_here ? LANES_OF(1) : LANES_OF(0);",
    # As PyTorch's decomposition computes it, so that compiled graphs drop the same elements.
    "dropout": "x = unit(draw) > first ? LANES_OF(1) : LANES_OF(0);",
}
# These are computed in pairs from two draws by the Box-Muller transform.
_OF_PAIRS = frozenset({"normal", "log_normal"})
_PAIR = """
  const value_t_lanes radius{a} = sqrt((value_t)-2 * log(above_zero(draw{a})));
  const value_t_lanes angle{a} = (value_t)6.283185307179586 * unit(draw{b});
  const value_t_lanes x{a} = radius{a} * cos(angle{a}), x{b} = radius{a} * sin(angle{a});"""


def scalar_words(dialect: Dialect, value: torch.dtype) -> str:
    """Returns functions for kernels whose work items draw single words.

    `philox(words, seed, offset, block)` fills four words. `above_zero(word)` is a `value_t` in (0, 1]. The kernel needs
    the types uint64 and int64.
    """
    return _words(dialect, value, wide=False, lanes=1) + _PHILOX + _NARROW


# The generator's seed and offset, as int64. The offset is a multiple of 4 that no other call uses.
Drawn = tuple[Any, Any]


class _Element(NamedTuple):
    """How elements are computed.

    Args:
        text: statements for a vector of consecutive elements.
        value: the compute dtype.
        numbers: arguments that the statements use.
        wide: whether an element needs 64 random bits; None: if `value` has 64 bits.
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
    """Fills `out`, a dense tensor, with random numbers of a distribution.

    Args:
        distribution: a key of DISTRIBUTIONS.
        drawn: the generator's seed and offset for this call.
        parameters: of the distribution:
            uniform: lower bound, upper bound, and the least number that rounds to the upper bound in out's dtype (by
                default the upper bound);
            normal and log_normal: mean and standard deviation;
            exponential: rate and least result;
            cauchy: median and scale;
            geometric and bernoulli: probability.
        chance: for bernoulli_each, a tensor with a probability for each element; it and `out` are contiguous.
    """
    value = value_dtype(out.dtype) if facts(out.dtype).category == "float" else torch.float32
    inputs = {} if chance is None else {"chance": chance}
    first, second = [*parameters[:2], 0, 0][:2]
    third = parameters[2] if len(parameters) > 2 else second
    numbers = {"first": (value, first), "second": (value, second), "third": (value, third)}
    wide = False if distribution.startswith("bernoulli") else None  # PyTorch's decomposition draws float32
    element = _Element(DISTRIBUTIONS[distribution], value, numbers, wide)
    return _launch(distribution, dialect, {"out": (out, "x")}, inputs, element, drawn)


def dropout(
    dialect: Dialect, out: torch.Tensor, mask: torch.Tensor, self: torch.Tensor, p: Any, scale: Any, drawn: Drawn
) -> Launch:
    """Sets mask to false with probability `p`, and out to self * scale where mask is true, otherwise to self * 0.

    All tensors are dense, with the same order of dimensions in memory.
    """
    value = value_dtype(out.dtype)
    outputs = {"out": (out, "self_here * (x * scale)"), "mask": (mask, "x")}
    element = _Element(DISTRIBUTIONS["dropout"], value, {"first": (value, p), "scale": (value, scale)})
    return _launch("dropout", dialect, outputs, {"self": self}, element, drawn)


def fill_integers(dialect: Dialect, out: torch.Tensor, base: int, count: int, drawn: Drawn) -> Launch:
    """Fills `out`, a dense tensor, with random integers from base to base + count - 1. count is at most 2^64."""
    numbers: dict[str, tuple[torch.dtype, Any]] = {"base": (torch.int64, base), "range": (torch.uint64, count % 2**64)}
    text = "x = TO_VALUE(TO_INT64((range == 0 ? TO_UINT64(draw) : TO_UINT64(draw) % range) + (uint64)base));"
    element = _Element(text, value_dtype(out.dtype), numbers, wide=count > NARROW_RANGE and 2**32 % count != 0)
    return _launch("integers", dialect, {"out": (out, "x")}, {}, element, drawn)


def shuffle_equal(dialect: Dialect, out: torch.Tensor, keys: torch.Tensor, drawn: Drawn) -> Launch:
    """Shuffles elements of `out` with equal keys; all their permutations are equally likely (Fisher-Yates).

    Both tensors are one-dimensional and contiguous; `keys` is sorted.
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


def write_state(dialect: Dialect, out: torch.Tensor, drawn: Drawn) -> Launch:
    """Writes the seed and the offset to `out` (int64)."""
    return LaunchSpec(
        "random_state",
        dialect,
        outputs={"out": out},
        inputs={},
        integers={},
        numbers=_state(drawn),
        types={"int64": torch.int64},
        value=torch.int64,
        functions="",
        body="store_out(item, item == 0 ? seed : offset);",
        items=2,
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
) -> Launch:
    """Returns the launch of a fill.

    Args:
        outputs: tensors, each with the expression to store after the element's statements. They and the inputs are
            dense, with the same order of dimensions in memory, and are processed in memory order.
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
        strided=[*outputs, *inputs],
    ).launch()


# The work item of the first of several equal keys shuffles their elements, starting from the last one.
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

# LANES elements of the tensor $ from `at` on, or as many as remain.
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
    """Interleaves the vectors `names`: returns as many vectors, with the first lanes of all, then the second, …."""
    if lanes == 1:
        return list(names)
    elements = [f"{name}.s{lane:x}" for lane in range(lanes) for name in names]
    return [f"({type_})({', '.join(elements[i : i + lanes])})" for i in range(0, len(elements), lanes)]


def _words(dialect: Dialect, value: torch.dtype, wide: bool, lanes: int) -> str:
    """Returns the types of words and draws, and conversions between vectors of `lanes` lanes."""
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
