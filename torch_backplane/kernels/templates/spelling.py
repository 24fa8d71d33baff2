"""Macros that precede hand-written kernel text and adapt it to each dialect.

Template text is C with FUNCTION (defined in the dialects' headers), the WORDS of dialects, and lanes.

Lanes: on non-SIMT targets (CPUs), `value_t_lanes` is a vector of LANES numbers, so that one work item fills a vector
register. On SIMT targets (`Target.simt`), LANES is 1 and `value_t_lanes` is `value_t`. Operators and functions such as
fmax, exp and fma accept both types. LANES_OF(x) has x in every lane; lanes_sum and lanes_max reduce the lanes to one
number.

Sums: SUM(total) declares a sum, ADD(total, x) adds to it, and TOTAL(total) is its value. Knuth's two-sum computes the
rounding error of each addition exactly. The errors are accumulated in total_lost, so that the error of the sum does
not grow with the number of additions. SUM_lanes(total) declares total_lanes for ADD_lanes; MEET(total) adds its lanes
to total.
"""

from __future__ import annotations

import re

import torch

from torch_backplane.kernels.dialects.base import WORDS, Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype

# The accumulated error of an infinite sum is NaN; SETTLE and TOTAL ignore it.
_SUMS = """\
#define SUM(sum) value_t sum = 0, sum##_lost = 0
#define SUM_lanes(sum) value_t_lanes sum##_lanes = LANES_OF(0), sum##_lanes_lost = LANES_OF(0)
#define ADD_AS(type, sum, lost, x) { const type added_ = (x), next_ = sum + added_, part_ = next_ - sum; \
  lost += (sum - (next_ - part_)) + (added_ - part_); sum = next_; }
#define ADD_PRODUCT(type, sum, lost, x, y) { const type product_ = (x) * (y); \
  lost += fma(x, y, -product_); ADD_AS(type, sum, lost, product_) }
#define ADD(sum, x) ADD_AS(value_t, sum, sum##_lost, x)
#define ADD_lanes(sum, x) ADD_AS(value_t_lanes, sum, sum##_lost, x)
#define SETTLE_AS(type, zero, sum, lost) { const type rest_ = lost == lost ? lost : zero; lost = zero; \
  ADD_AS(type, sum, lost, rest_) }
#define SETTLE(sum) SETTLE_AS(value_t, (value_t)0, sum, sum##_lost)
#define SETTLE_lanes(sum) SETTLE_AS(value_t_lanes, LANES_OF(0), sum##_lanes, sum##_lanes_lost)
#define TOTAL(sum) (sum##_lost == sum##_lost ? sum + sum##_lost : sum)
#define MEET(sum) lanes_meet(sum##_lanes, sum##_lanes_lost, &sum, &sum##_lost)
"""

# Marks a store that intentionally races with stores of other work items to the same location: any of the values is a
# correct result. The sanitizer's race detection defines this macro differently, to ignore such stores.
_ANY_MAY_STAY = """\
#ifndef ANY_MAY_STAY
#define ANY_MAY_STAY(store) store
#endif
"""

_WORDS = {word.partition("(")[0]: word for word in WORDS}


def macros(dialect: Dialect, text: str) -> str:
    """Returns the macros that precede every template's text.

    Raises:
        MissingOperation: `text` uses a function or word that the dialect lacks.
    """
    for name, called in dict.fromkeys(re.findall(r"\b([A-Za-z_]\w*)\b(\(?)", text)):
        if (called and name in dialect.missing) or (name in _WORDS and _WORDS[name] not in dialect.words):
            dialect.lacks(name)
    words = "".join(f"#define {word} {meaning}\n" for word, meaning in dialect.words.items())
    return words + _SUMS + (_ANY_MAY_STAY if "ANY_MAY_STAY" in text else "")


def lane_count(dialect: Dialect, value: torch.dtype) -> int:
    """Returns LANES: as many as a target register holds, at most 16; 1 for bool, which has no vectors."""
    if not dialect.vectors or dialect.target.register_bytes == 0 or value == torch.bool:
        return 1
    return min(16, 8 * dialect.target.register_bytes // facts(value).bits)


def lanes(dialect: Dialect, value: torch.dtype) -> str:
    """Returns the declarations of `value_t_lanes` and its functions for a `value_t` of dtype `value`."""
    width = lane_count(dialect, value)
    is_float = facts(value).category == "float"
    greater = "fmax" if is_float else "max"
    if width == 1:
        return """\
#define LANES 1
typedef value_t value_t_lanes;
#define LANES_OF(x) (x)
#define lanes_sum(x) (x)
#define lanes_max(x) (x)
#define lanes_get(x, array) (array)[0] = (x)
#define lanes_put(array) (array)[0]
FUNCTION void lanes_meet(const value_t x, const value_t lost, value_t* sum, value_t* sum_lost) {
  ADD_AS(value_t, *sum, *sum_lost, x) *sum_lost += lost;
}
"""
    name = dialect.type(value)
    lines = [
        f"#define LANES {width}",
        f"typedef {name}{width} value_t_lanes;",
        "#define LANES_OF(x) ((value_t_lanes)(x))",
        f"#define lanes_get(x, array) vstore{width}(x, 0, array)",
        f"#define lanes_put(array) vload{width}(0, array)",
    ]
    for function, combine in (("sum", "{0}.lo + {0}.hi"), ("max", greater + "({0}.lo, {0}.hi)")):
        steps, at, half = [], "x", width // 2
        while half:
            steps.append(f"const {name}{half if half > 1 else ''} x{half} = {combine.format(at)};")
            at, half = f"x{half}", half // 2
        lines.append(f"FUNCTION {name} lanes_{function}(const value_t_lanes x) {{ {' '.join(steps)} return x1; }}")
    lines.append(
        f"FUNCTION void lanes_meet(const value_t_lanes x, const value_t_lanes lost, {name}* sum, {name}* sum_lost) {{"
    )
    at, lost, half = "x", "lost", width // 2
    while half:
        kind = f"{name}{half if half > 1 else ''}"
        lines.append(f"  {kind} x{half} = {at}.lo, lost{half} = {lost}.lo + {lost}.hi;")
        lines.append(f"  ADD_AS({kind}, x{half}, lost{half}, {at}.hi)")
        at, lost, half = f"x{half}", f"lost{half}", half // 2
    lines.append("  ADD_AS(value_t, *sum, *sum_lost, x1) *sum_lost += lost1;\n}")
    return "\n".join(lines) + "\n"


def turning(name: str, vector: str, width: int, bits: int) -> str:
    """Returns a function `name` that transposes a square matrix of `width` vectors of `width` elements of `bits` bits.

    Each pass combines pairs of vectors into pairs of new vectors. The first passes shuffle elements within parts of
    128 bits, which takes one instruction each; the later passes exchange whole parts.

    Args:
        vector: the vector type in OpenCL C.
    """
    part = min(width, _PART_BITS // bits)
    vectors = [(f"x[{row}]", [(row, column) for column in range(width)]) for row in range(width)]
    lines, step = [], 1
    while step < width:
        for i in range(width):
            if i & step:
                continue
            (one, has_one), (other, has_other) = vectors[i], vectors[i + step]
            both = has_one + has_other
            for at, chosen in zip((i, i + step), _mixed(width, part, step), strict=True):
                made = f"x{step}_{at}"
                lines.append(f"  const {vector} {made} = {name}_mix({one}, {other}, {', '.join(map(str, chosen))});")
                vectors[at] = made, [both[number] for number in chosen]
        step *= 2
    lines += [f"  x[{numbers[0][1]}] = {made};" for made, numbers in vectors]
    return mixing(f"{name}_mix", width, bits) + "\n".join([f"FUNCTION void {name}({vector}* x) {{", *lines, "}\n"])


def mixing(name: str, width: int, bits: int) -> str:
    """Defines the macro `name(one, other, n0, n1, …)`: elements n0, n1, … of the concatenation of two vectors.

    Each vector has `width` elements of `bits` bits. Clang gets its builtin: it splits OpenCL C's shuffle2 into scalar
    moves, which take far more instructions.
    """
    mask = {8: "uchar", 16: "ushort", 32: "uint", 64: "ulong"}[bits]
    numbers = ", ".join(f"n{i}" for i in range(width))
    return f"""\
#ifdef __clang__
#define {name}(one, other, {numbers}) __builtin_shufflevector(one, other, {numbers})
#else
#define {name}(one, other, {numbers}) shuffle2(one, other, ({mask}{width})({numbers}))
#endif
"""


_PART_BITS = 128


def _mixed(width: int, part: int, step: int) -> tuple[list[int], list[int]]:
    """Returns the element indices, in the concatenation of two vectors, of the two vectors that a pass makes of them.

    If `step` is smaller than a part, they interleave runs of `step` elements of the two vectors: one from the lower
    halves of the parts, the other from the upper halves. Otherwise they take the even and the odd parts.
    """
    if step >= part:
        even = [at for at in range(2 * width) if at // part % 2 == 0]
        return even, [at + part for at in even]
    lower = [
        first + at + vector * width
        for first in range(0, width, part)
        for chunk in range(0, part // 2, step)
        for vector in (0, 1)
        for at in range(chunk, chunk + step)
    ]
    return lower, [at + part // 2 for at in lower]


def lane_access(dialect: Dialect, name: str, dtype: torch.dtype, value: torch.dtype) -> str:
    """Defines `load_NAME_lanes(at)` and `store_NAME_lanes(at, x)` for LANES elements from `at` on, as value_t."""
    width = lane_count(dialect, value)
    if width == 1:
        return (
            f"#define load_{name}_lanes(at) ((value_t)load_{name}(at))\n"
            f"#define store_{name}_lanes(at, x) store_{name}(at, x)\n"
        )
    stored = f"vstore{width}({{}}, 0, {name} + (at))"
    if dtype == torch.float16:
        store = stored.format(f"lanes_to_half(convert_float{width}(x))")
    elif dtype == torch.bfloat16:
        store = stored.format(f"bfloat16_lanes(as_uint{width}(convert_float{width}(x)))")
    elif dtype == torch.bool:
        store = stored.format(f"convert_uchar{width}(x)")
    else:
        store = stored.format(f"convert_{dialect.type(dtype)}{width}(x)")
    load = vector_load(dialect, f"{name} + (at)", dtype, width)
    if value_dtype(dtype) != value:
        load = f"convert_{dialect.type(value)}{width}({load})"
    return f"#define load_{name}_lanes(at) {load}\n#define store_{name}_lanes(at, x) {store}\n"


def vector_load(dialect: Dialect, pointer: str, dtype: torch.dtype, width: int) -> str:
    """Returns an expression that loads `width` consecutive elements as a vector of the compute dtype.

    float16 needs `half_to_lanes`.
    """
    loaded = f"vload{width}(0, {pointer})"
    if dtype == torch.float16:
        return f"half_to_lanes({loaded})"
    if dtype == torch.bfloat16:
        return f"as_float{width}(convert_uint{width}({loaded}) << 16)"
    if dtype == torch.bool:
        return f"(convert_int{width}({loaded}) != 0 ? 1 : 0)"
    return loaded


def pointers(dialect: Dialect, name: str, dtype: torch.dtype) -> str:
    """Defines `NAME_pointer`, a pointer to const elements, and `load_NAME_from(pointer, at)`, the load through one.

    Loops that step through several rows need fewer instructions with one pointer per row than with indices.
    """
    return (
        f"typedef const GLOBAL {dialect.storage_type(dtype)}* {name}_pointer;\n"
        f"#define load_{name}_from(pointer, at) ({dialect.decode('(pointer)[at]', dtype)})\n"
    )


def lane_functions(dialect: Dialect, dtypes: frozenset[torch.dtype], value: torch.dtype) -> str:
    """Returns the functions that `lane_access` uses: float16 conversion, and rounding to bfloat16.

    Rounding to bfloat16 is to nearest even and keeps NaN.
    """
    width = lane_count(dialect, value)
    if width == 1:
        return ""
    return "".join(text for dtype, text in _lane_functions(width).items() if dtype in dtypes)


def _lane_functions(width: int) -> dict[torch.dtype, str]:
    # Convert float16 through a variable: PoCL 3.1 assumes that memory has the alignment of the vector, although the
    # standard requires only the alignment of a half.
    return {
        torch.float16: f"""\
FUNCTION float{width} half_to_lanes(const ushort{width} bits) {{ return vload_half{width}(0, (const half*)&bits); }}
FUNCTION ushort{width} lanes_to_half(const float{width} x) {{
  ushort{width} bits;
  vstore_half{width}_rte(x, 0, (half*)&bits);
  return bits;
}}
""",
        torch.bfloat16: f"""\
FUNCTION ushort{width} bfloat16_lanes(const uint{width} bits) {{
  const uint{width} rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return convert_ushort{width}((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}}
""",
    }
