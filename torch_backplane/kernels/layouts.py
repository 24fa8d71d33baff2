"""Which index arithmetic a call needs: contiguous or strided over how many dimensions, with 32 or 64 bits.

A kernel is specialised on a `Layout`, never on sizes or strides: those are its arguments, so a new shape needs no new
compile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NARROW_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Layout:
    """Args:
    rank: number of dimensions to loop over; 0 where every operand is contiguous.
    width: elements for each work item; more than 1 only where contiguous.
    wide: whether indices need 64 bits.
    """

    rank: int = 0
    width: int = 4
    wide: bool = False

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank is 0 for contiguous or a number of dimensions, and got {self.rank}")
        if self.width not in (1, 2, 4, 8, 16):
            raise ValueError(f"width is 1, 2, 4, 8 or 16, and got {self.width}")
        if self.rank and self.width != 1:
            raise ValueError(f"a strided layout has width 1, and got {self.width}")


@dataclass(frozen=True)
class Geometry:
    """A call's layout with its sizes and, for each operand, strides in elements; the innermost dimension first."""

    layout: Layout
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return math.prod(self.sizes)


def geometry(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], *, width: int = 4, aligned: bool = True
) -> Geometry:
    """The simplest geometry that visits every element once.

    Args:
        sizes: of the call, that is of its outputs.
        strides: for each operand, outputs first, one stride for each size; 0 where the operand is broadcast.
        width: what the device prefers where everything is contiguous.
        aligned: whether every operand begins at a multiple of width elements; without it, width is 1.
    """
    for operand in strides:
        if len(operand) != len(sizes):
            raise ValueError(f"{len(operand)} strides for {len(sizes)} sizes; broadcast operands have stride 0")
    sizes_, strides_ = _collapse(sizes, strides)
    count = math.prod(sizes_)
    furthest = (sum((size - 1) * step for size, step in zip(sizes_, operand, strict=True)) for operand in strides_)
    wide = max(count, *furthest) > NARROW_LIMIT
    if count <= 1 or (len(sizes_) == 1 and all(operand == (1,) for operand in strides_)):
        return Geometry(Layout(0, width if aligned else 1, wide), (count,), tuple((1,) for _ in strides_))
    return Geometry(Layout(len(sizes_), 1, wide), sizes_, strides_)


def _collapse(
    sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Drops dimensions of size 1, orders the rest by stride, and merges neighbours that every operand steps through."""
    dimensions = [(size, steps) for size, *steps in zip(sizes, *strides, strict=True) if size != 1]
    dimensions.sort(key=lambda dimension: dimension[1])  # innermost first; the outputs decide
    merged: list[tuple[int, list[int]]] = []
    for size, steps in dimensions:
        if merged and all(step == inner * merged[-1][0] for step, inner in zip(steps, merged[-1][1], strict=True)):
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, steps))
    return tuple(size for size, _ in merged), tuple(
        tuple(steps[operand] for _, steps in merged) for operand in range(len(strides))
    )
