"""One-dimensional Fourier transforms of lengths whose prime factors are at most 13.

Stockham's algorithm: a pass of radix r combines r transforms to one of r times the length. Each work item has r numbers
in registers (Van Loan, Computational Frameworks for the Fast Fourier Transform, 1992, section 1.7). On SIMT targets, if
local memory has room for a transform twice, a work group computes all its passes there in one launch. Otherwise, each
pass is a launch that reads and writes everything once, with adjacent accesses. Twiddle factors are computed where they
are needed: integer arithmetic reduces the angle to an eighth of a circle, and polynomials evaluate it.

An inverse transform is a forward transform with real and imaginary parts swapped in input and output (`flip`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.templates.source import Launch, LaunchSpec

LARGEST_PRIME = 13
_LARGEST_RADIX = 16


def radices(size: int) -> list[int] | None:
    """Returns the radices of a transform's passes, or None if a prime factor of the length is too large."""
    primes, prime = [], 2
    while prime <= LARGEST_PRIME:
        while size % prime == 0:
            primes.append(prime)
            size //= prime
        prime += 1
    if size > 1:
        return None
    found: list[int] = []
    for one in sorted(primes, reverse=True):
        for at, radix in enumerate(found):
            if radix * one <= _LARGEST_RADIX:
                found[at] *= one
                break
        else:
            found.append(one)
    return found or [1]


def fft(
    dialect: Dialect,
    out: torch.Tensor,
    x: torch.Tensor,
    size: int,
    rooms: Callable[[], torch.Tensor],
    *,
    inverse: bool,
    scale: float,
) -> list[Launch]:
    """Computes transforms along the second of three dimensions.

    Args:
        out: complex; or real, for an inverse transform of a conjugate symmetric input. Along the second dimension it
            has all `size` results or the first of them.
        x: complex or real; or the first half of a conjugate symmetric input.
        size: length of the transform; `radices(size)` must not be None.
        rooms: allocates a tensor for results of intermediate passes.
        scale: factor of the results.
    """
    passes = radices(size)
    assert passes is not None
    data = _Data(x, out, size, inverse, scale)
    together = _together(dialect, data, passes)
    if together:
        return [_in_local_memory(dialect, data, passes, together)]
    launches: list[Launch] = []
    made: list[torch.Tensor] = []  # the outputs of passes, which alternate between two tensors
    done = 1
    for radix in passes[:-1]:
        made.append(rooms() if len(made) < 2 else made[-2])
        launches.append(_fft_pass(dialect, data._replace(out=made[-1], scale=1.0), radix, done))
        data, done = data._replace(x=made[-1]), done * radix
    launches.append(_fft_pass(dialect, data, passes[-1], done))
    return launches


# Whether the input is real; whether it is half of a conjugate symmetric input; whether results are real.
_Kinds = tuple[bool, bool, bool]


class _Data(NamedTuple):
    """The operands of a kernel, as in `fft`."""

    x: torch.Tensor
    out: torch.Tensor
    size: int
    inverse: bool
    scale: float

    @property
    def value(self) -> torch.dtype:
        return self.x.dtype.to_real() if self.x.is_complex() else self.x.dtype

    def kinds(self) -> _Kinds:
        return not self.x.is_complex(), self.x.shape[1] < self.size, not self.out.is_complex()

    def launch(self, name: str, dialect: Dialect, body: str, **options: Any) -> Launch:
        parts = {
            name: torch.view_as_real(one) if one.is_complex() else one
            for name, one in (("x", self.x), ("out", self.out))
        }
        integers = {"flip": int(self.inverse), "kept": self.out.shape[1], "inner": self.x.shape[2]}
        for tensor, one in parts.items():
            for place, step in zip(("outer", "step", "inner"), one.stride(), strict=False):
                integers[f"{tensor}_{place}"] = step
        words = zip(("_of_reals", "_of_half", "_to_reals"), self.kinds(), strict=True)
        return LaunchSpec(
            name + "".join(word for word, holds in words if holds),
            dialect,
            outputs={"out": parts["out"]},
            inputs={"x": parts["x"]},
            integers={**integers, **options.pop("integers")},
            numbers={"scale": (self.value, self.scale)},
            body=body,
            value=self.value,
            functions=_twiddles(self.value),
            strided={"x", "out"},
            **options,
        ).launch()


def _fft_pass(dialect: Dialect, data: _Data, radix: int, done: int) -> Launch:
    """Returns a pass that combines transforms of length `done` to transforms of length `done * radix`."""
    items = data.x.shape[0] * data.x.shape[2] * (data.size // radix)
    integers = {"size": data.size, "done": done}
    return data.launch(f"fft_{radix}", dialect, _pass_text(radix, data.kinds()), items=items, integers=integers)


@lru_cache(maxsize=256)
def _pass_text(radix: int, kinds: _Kinds) -> str:
    lines = [
        "const index_t inner_at = item % inner, rest = item / inner;",
        f"const index_t steps = size / {radix}, t = rest % steps, outer_at = rest / steps;",
        *_step(radix, _load(kinds), _store(kinds)),
    ]
    return "\n".join(lines)


# Numbers per work group, and numbers per work item.
_IN_A_GROUP, _PER_ITEM = 1024, 8


def _together(dialect: Dialect, data: _Data, passes: Sequence[int]) -> int:
    """Returns how many transforms a work group computes in local memory, in one launch; 0 if each pass is a launch."""
    if not dialect.target.simt or len(passes) < 2:
        return 0
    most = max(1, _IN_A_GROUP // data.size)
    while most and 4 * most * _pitch(data.size, most) * data.value.itemsize > dialect.target.local_memory:
        most -= 1
    return most


def _pitch(size: int, together: int) -> int:
    """Returns the distance between transforms in local memory, which avoids bank conflicts."""
    return size + 1 if together > 1 else size


def _in_local_memory(dialect: Dialect, data: _Data, passes: Sequence[int], together: int) -> Launch:
    """Returns a launch of all passes, with `together` transforms per work group. The text is specific to the length."""
    group = min(dialect.target.large_group, max(dialect.target.group_multiple, together * data.size // _PER_ITEM))
    transforms = data.x.shape[0] * data.x.shape[2]
    return data.launch(
        "fft_" + "_".join(map(str, passes)),
        dialect,
        _local_text(data.size, tuple(passes), together, group, data.kinds()),
        groups=-(-transforms // together),
        group_size=group,
        integers={"transforms": transforms},
    )


@lru_cache(maxsize=256)
def _local_text(size: int, passes: tuple[int, ...], together: int, group: int, kinds: _Kinds) -> str:
    pitch = _pitch(size, together)
    lines = [
        f"LOCAL value_t re_0[{together * pitch}], im_0[{together * pitch}];",
        f"LOCAL value_t re_1[{together * pitch}], im_1[{together * pitch}];",
        f"const index_t size = {size};",
    ]
    done = 1
    for at, radix in enumerate(passes):
        first, last = at == 0, at == len(passes) - 1
        steps = size // radix
        count = together * steps
        load = _load(kinds) if first else _load_local((at + 1) % 2, pitch)
        store = _store(kinds) if last else _store_local(at % 2, pitch)
        lines += [
            f"for (index_t round = 0; round < {-(-count // group)}; ++round) {{",
            f"const index_t i = round * {group} + ITEM, steps = {steps}, done = {done};",
            f"const index_t own = inner > 1 ? i % {together} : i / steps, t = inner > 1 ? i / {together} : i % steps;",
            f"const index_t number = (index_t)GROUP * {together} + own;",
            f"if (i < {count} && number < transforms) {{",
            "const index_t inner_at = number % inner, outer_at = number / inner;",
            *_step(radix, load, store, first=first),
            "}",
            "}",
            *([] if last else ["BARRIER;"]),
        ]
        done *= radix
    return "\n".join(lines)


def fft_chirp(dialect: Dialect, out: torch.Tensor, size: int, *, inverse: bool) -> Launch:
    """Computes exp(πi j² / size) for -size < j < size, or its conjugate if `inverse`, for Bluestein's algorithm.

    Args:
        out: complex, contiguous. It starts with j = 0. If it has more than `size` elements, it ends with the negative
            j, up to -1, and has zeros in between.
    """
    value = out.real.dtype
    return LaunchSpec(
        "fft_chirp",
        dialect,
        outputs={"out": torch.view_as_real(out)},
        inputs={},
        integers={"size": size, "down": int(inverse)},
        body=_CHIRP,
        items=out.numel(),
        value=value,
        types={"square_t": torch.int64},
        functions=_twiddles(value),
    ).launch()


_CHIRP = """
const index_t at = item < size ? item : items - item < size ? items - item : size;
value_t c = 0, s = 0;
if (at < size) turn((index_t)((square_t)at * at % (2 * (square_t)size)), 2 * size, &c, &s);
store_out(2 * item, c);
store_out(2 * item + 1, down ? -s : s);
"""


def _twiddles(value: torch.dtype) -> str:
    return _TURN.replace("$cosine", _series(value, 0)).replace("$sine", _series(value, 1))


def _series(dtype: torch.dtype, first: int) -> str:
    """Returns the Taylor polynomial in y = x² of cos(π/2 x) (`first` 0) or sin(π/2 x) / x (`first` 1) for x ≤ 1/2."""
    terms = (6 if first == 0 else 5) if dtype == torch.float32 else 10
    text = "0"
    for power in reversed(range(terms)):
        order = 2 * power + first
        coefficient = (-1) ** power * (math.pi / 2) ** order / math.factorial(order)
        text = f"(value_t){coefficient!r} + y * ({text})" if text != "0" else f"(value_t){coefficient!r}"
    return text


# Cosine and sine of the angle 2π e / n, 0 <= e < n.
_TURN = """
FUNCTION void turn(index_t e, const index_t n, value_t* cosine, value_t* sine) {
  const int lower = e > n - e;
  e = 2 * (lower ? n - e : e);
  const int left = e > n - e;
  e = 2 * (left ? n - e : e);
  const int steep = e > n - e;
  e = steep ? n - e : e;
  const value_t x = (value_t)e / (value_t)n, y = x * x;
  const value_t c = $cosine;
  const value_t s = x * ($sine);
  const value_t across = steep ? s : c, up = steep ? c : s;
  *cosine = left ? -across : across;
  *sine = lower ? -up : up;
}
"""


# _Load(q) returns lines that load element i{q} of a transform into re{q} and im{q}. _Store(i, re, im) returns a line
# that stores re and im to the element with index variable i.
_Load = Callable[[int], list[str]]
_Store = Callable[[str, str, str], str]


def _step(radix: int, load: _Load, store: _Store, first: bool = False) -> list[str]:
    """Returns lines for one work item of a pass, number t of `steps`.

    The first pass (`first`) needs no twiddle factors.
    """
    lines = [f"const index_t k = t % done, start = (t - k) * {radix} + k;"]
    for q in range(radix):
        lines += [f"const index_t i{q} = t + {q} * steps;", *load(q)]
    if radix > 1 and not first:
        lines.append("if (done > 1) {")
        for q in range(1, radix):
            lines.append(
                f"  {{ value_t c, s; turn({q} * k, done * {radix}, &c, &s); "
                f"const value_t r = re{q} * c + im{q} * s; im{q} = im{q} * c - re{q} * s; re{q} = r; }}"
            )
        lines.append("}")
    butterfly = _Butterfly()
    results = butterfly.transform([(f"re{q}", f"im{q}") for q in range(radix)])
    lines += butterfly.lines
    for q, (re, im) in enumerate(results):
        lines += [f"const index_t o{q} = start + {q} * done;", store(f"o{q}", re, im)]
    return lines


def _load(kinds: _Kinds) -> _Load:
    """Returns a function that writes loads from device memory."""
    of_reals, of_half, _ = kinds
    start = "outer_at * x_outer + inner_at * x_inner"

    def lines(q: int) -> list[str]:
        if of_reals:
            return [f"value_t re{q} = load_x({start} + i{q} * x_step), im{q} = 0;"]
        if not of_half:
            return [
                f"const index_t at{q} = {start} + i{q} * x_step;",
                f"value_t re{q} = load_x(at{q} + flip), im{q} = load_x(at{q} + 1 - flip);",
            ]
        return [
            f"const int mirrored{q} = i{q} > size - i{q};",
            f"const index_t at{q} = {start} + (mirrored{q} ? size - i{q} : i{q}) * x_step;",
            f"const value_t own{q} = load_x(at{q}), other{q} = load_x(at{q} + 1);",
            f"const value_t signed{q} = mirrored{q} ? -other{q} : other{q};",
            f"value_t re{q} = flip ? signed{q} : own{q}, im{q} = flip ? own{q} : signed{q};",
        ]

    return lines


def _store(kinds: _Kinds) -> _Store:
    """Returns a function that writes stores to device memory."""
    start = "outer_at * out_outer + inner_at * out_inner"

    def line(i: str, re: str, im: str) -> str:
        at = f"{start} + {i} * out_step"
        if kinds[2]:
            return f"if ({i} < kept) store_out({at}, (flip ? {im} : {re}) * scale);"
        stores = f"store_out({at} + flip, {re} * scale); store_out({at} + 1 - flip, {im} * scale);"
        return f"if ({i} < kept) {{ {stores} }}"

    return line


def _load_local(room: int, pitch: int) -> _Load:
    return lambda q: [f"value_t re{q} = re_{room}[own * {pitch} + i{q}], im{q} = im_{room}[own * {pitch} + i{q}];"]


def _store_local(room: int, pitch: int) -> _Store:
    return lambda i, re, im: f"re_{room}[own * {pitch} + {i}] = {re}; im_{room}[own * {pitch} + {i}] = {im};"


_Number = tuple[str, str]  # names of the real and the imaginary part


class _Butterfly:
    """Builds the statements of a short transform in registers, in `lines`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def transform(self, x: Sequence[_Number]) -> list[_Number]:
        """Returns the transform of `x`, in order."""
        size = len(x)
        if size == 1:
            return list(x)
        if size == 2:
            return [self._sum(*x), self._difference(*x)]
        prime = next(one for one in (2, 3, 5, 7, 11, 13) if size % one == 0)
        if prime == size:
            return self._of_prime(x)
        rows = size // prime
        parts = [self.transform(x[start::prime]) for start in range(prime)]
        results: list[_Number] = [("", "")] * size
        for k in range(rows):
            rotated = [self._rotated(part[k], start * k, size) for start, part in enumerate(parts)]
            for q, one in enumerate(self.transform(rotated)):
                results[k + rows * q] = one
        return results

    def _of_prime(self, x: Sequence[_Number]) -> list[_Number]:
        """Computes a transform of prime length from sums and differences of elements with opposite angles."""
        size, half = len(x), len(x) // 2
        sums = [self._sum(x[j], x[size - j]) for j in range(1, half + 1)]
        differences = [self._difference(x[j], x[size - j]) for j in range(1, half + 1)]
        total = x[0]
        for one in sums:
            total = self._sum(total, one)
        results = [total] + [("", "")] * (size - 1)
        for k in range(1, half + 1):
            angles = [2 * math.pi * (j * k % size) / size for j in range(1, half + 1)]
            even = [x[0][part] + self._terms(sums, angles, math.cos, part) for part in (0, 1)]
            odd = ["0" + self._terms(differences, angles, math.sin, part) for part in (0, 1)]
            a, b = self._new(*even), self._new(*odd)
            results[k] = self._new(f"{a[0]} + {b[1]}", f"{a[1]} - {b[0]}")
            results[size - k] = self._new(f"{a[0]} - {b[1]}", f"{a[1]} + {b[0]}")
        return results

    @staticmethod
    def _terms(
        numbers: Sequence[_Number], angles: Sequence[float], function: Callable[[float], float], part: int
    ) -> str:
        return "".join(
            f" + {_constant(function(angle))} * {one[part]}" for one, angle in zip(numbers, angles, strict=True)
        )

    def _rotated(self, x: _Number, steps: int, size: int) -> _Number:
        """Returns x rotated clockwise by `steps` / `size` of a circle."""
        eighths, rest = divmod(8 * (steps % size), size)
        if rest == 0 and eighths % 2 == 0:
            re, im = x
            return {0: x, 2: self._new(im, f"-{re}"), 4: self._new(f"-{re}", f"-{im}"), 6: self._new(f"-{im}", re)}[
                eighths
            ]
        angle = 2 * math.pi * (steps % size) / size
        c, s = _constant(math.cos(angle)), _constant(math.sin(angle))
        re, im = x
        return self._new(f"{re} * {c} + {im} * {s}", f"{im} * {c} - {re} * {s}")

    def _sum(self, a: _Number, b: _Number) -> _Number:
        return self._new(f"{a[0]} + {b[0]}", f"{a[1]} + {b[1]}")

    def _difference(self, a: _Number, b: _Number) -> _Number:
        return self._new(f"{a[0]} - {b[0]}", f"{a[1]} - {b[1]}")

    def _new(self, re: str, im: str) -> _Number:
        number = len(self.lines)
        self.lines.append(f"const value_t v{number} = {re}, w{number} = {im};")
        return f"v{number}", f"w{number}"


def _constant(value: float) -> str:
    return f"(value_t){value!r}" if value >= 0 else f"(value_t)({value!r})"
