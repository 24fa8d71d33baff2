"""Which index arithmetic a call needs: contiguous or strided over how many dimensions, with 32 or 64 bits.

A kernel is specialised on a `Layout`, never on sizes or strides: those are its arguments, so a new shape needs no new
compile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

NARROW_LIMIT = 2**31 - 1


class RowLimits(NamedTuple):
    """For which calls a device is given a launch in rows.

    Args:
        shortest: elements of a row.
        most: rows, in the second dimension of the launch.
    """

    shortest: int = 16
    most: int = 65535 * 4  # CUDA's limit of groups, of 4 rows each


class TileLimits(NamedTuple):
    """
    Args:
        memory: bytes for tiles, at most; 0: no tiles.
        side: of all tiles, which are of matrices of half as much at least; 0: as the sizes ask.
    """

    memory: int = 0
    side: int = 0


@dataclass(frozen=True)
class Layout:
    """Args:
    rank: number of dimensions to loop over; 0 where every operand is contiguous.
    width: elements for each work item; more than 1 only where contiguous.
    wide: whether indices need 64 bits.
    inner: empty, or, where a launch has one dimension for the innermost dimension and one for the others (`rows`), each
        operand's stride there: 0, 1, or 2 for any other. Compilers make vectors of strides that they know. In tiles 3
        is an input that is read by its own rows first.
    tile: empty, or, where a group has a tile of the innermost dimension and another one, in which neighbours of some
        inputs are neighbours in memory: that dimension, and the tile's elements along the innermost one and along it,
        powers of two.
    """

    rank: int = 0
    width: int = 4
    wide: bool = False
    inner: tuple[int, ...] = ()
    tile: tuple[int, int, int] | tuple[()] = ()

    @property
    def rows(self) -> bool:
        return bool(self.inner) and not self.tile

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

    @property
    def rows(self) -> int:
        """How often the innermost dimension is gone through."""
        return math.prod(self.sizes[1:])

    @property
    def tiles(self) -> int:
        """How many groups have a tile each."""
        return tiles(self.layout.tile, self.sizes)


def geometry(
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    *,
    width: int = 4,
    aligned: bool = True,
    limits: RowLimits = RowLimits(),  # noqa: B008, it cannot be changed
    staged: Sequence[int] = (),
    tile_limits: TileLimits = TileLimits(),  # noqa: B008, it cannot be changed
) -> Geometry:
    """The simplest geometry that visits every element once.

    Args:
        sizes: of the call, that is of its outputs.
        strides: for each operand, outputs first, one stride for each size; 0 where the operand is broadcast.
        width: what the device prefers where everything is contiguous.
        aligned: whether every operand begins at a multiple of width elements; without it, width is 1.
        limits: which calls that are not contiguous go by rows.
        staged: for each operand, the bytes of an element if it is an input, which a tile may read first, else 0.
    """
    for operand in strides:
        if len(operand) != len(sizes):
            raise ValueError(f"{len(operand)} strides for {len(sizes)} sizes; broadcast operands have stride 0")
    sizes_, strides_ = _collapse(sizes, strides)
    count = math.prod(sizes_)
    wide = is_wide(count, *(_furthest(sizes_, operand) for operand in strides_))
    if count <= 1 or (len(sizes_) == 1 and all(operand == (1,) for operand in strides_)):
        layout = Layout(0, width if aligned else 1, wide)
        return Geometry(layout, (count,), tuple((1,) for _ in strides_))
    if tile_limits.memory:
        tile, inner = _tile(sizes_, strides_, staged, tile_limits.memory, tile_limits.side)
        if tile:
            return Geometry(Layout(len(sizes_), 1, wide, inner, tile=tile), sizes_, strides_)
    inner = ()
    if sizes_[0] >= limits.shortest and count // sizes_[0] <= limits.most:
        inner = tuple(int(min(operand[0], 2)) for operand in strides_)
    return Geometry(Layout(len(sizes_), 1, wide, inner), sizes_, strides_)


SECTOR = 32  # bytes that GPUs read from memory at once, at least
_LEAST_TILE = 128  # elements: of smaller matrices those of the launch's next ones are in the same sectors


def tiles(tile: Sequence[int], sizes: Sequence[int]) -> int:
    """How many tiles there are of `sizes`, the innermost first."""
    along, width, height = tile
    others = math.prod(size for dim, size in enumerate(sizes) if dim not in (0, along))
    return -(-sizes[0] // width) * -(-sizes[along] // height) * others


def tile_pitch(tile: Sequence[int], itemsize: int) -> int:
    """Elements of local memory from a tile's place to the next one along the innermost dimension. More than the tile's
    height, so that neighbouring work items are in different banks of 4 bytes, both ways.
    """
    _, width, height = tile
    return height + max(1, 4 // itemsize) * max(1, 32 // width)


def _tile(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], staged: Sequence[int], memory: int, fixed: int
) -> tuple[tuple[int, int, int] | tuple[()], tuple[int, ...]]:
    """The tile, and each operand's stride along the innermost dimension as `Layout.inner` has it; both empty where
    no input is read faster so. `fixed`: as `TileLimits.side`.
    """
    along = 0
    if 2 * sizes[0] < fixed:
        return (), ()
    for steps, itemsize in zip(strides, staged, strict=True):
        if along == 0 and itemsize > 0 and steps[0] > 0:
            fastest = 0
            for dim in range(1, len(sizes)):
                if 0 < steps[dim] < steps[fastest]:
                    fastest = dim
            if steps[fastest] * itemsize < SECTOR:
                along = fastest
    if along == 0 or 2 * sizes[along] < fixed:
        return (), ()
    inner = tuple(
        3
        if itemsize > 0 and steps[0] > steps[along] > 0 and steps[along] * itemsize < SECTOR
        else int(min(steps[0], 2))
        for steps, itemsize in zip(strides, staged, strict=True)
    )
    through = [itemsize for itemsize, step in zip(staged, inner, strict=True) if step == 3]
    for edge in (fixed,) if fixed else (64, 32, 16):
        if edge == 64 and max(through) > 2:  # 64 bytes to a row, at least
            continue
        width, height = (fixed, fixed) if fixed else (_side(sizes[0], edge), _side(sizes[along], edge))
        if width < edge:
            height = _side(sizes[along], edge * edge // width)
        elif height < edge:
            width = _side(sizes[0], edge * edge // height)
        if width * height < _LEAST_TILE:
            break
        tile = (along, width, height)
        if sum(width * tile_pitch(tile, itemsize) * itemsize for itemsize in through) <= memory:
            return tile, inner
    return (), ()


def _side(size: int, most: int) -> int:
    side = 2
    while side < most and side < size:
        side *= 2
    return side


@dataclass(frozen=True)
class ReductionGeometry:
    """What a reduction keeps (operands: outputs, then inputs) and what it reduces (operands: inputs)."""

    kept: Geometry
    reduced: Geometry

    @property
    def wide(self) -> bool:
        return self.kept.layout.wide


def reduction_geometry(
    sizes: Sequence[int], dims: Sequence[int], outputs: Sequence[Sequence[int]], inputs: Sequence[Sequence[int]]
) -> ReductionGeometry:
    """The geometry of a reduction of an input's `sizes` over `dims`.

    Args:
        outputs: strides of each output, one for each dimension that is kept.
        inputs: strides of each input, one for each of sizes.

    Positions in the reduced dimensions count in the order of dims' numbers, as PyTorch's argmax does.
    """
    for dim in dims:
        if not -len(sizes) <= dim < len(sizes):
            raise IndexError(f"dimension {dim} of {len(sizes)}")
    reduced_dims = sorted({dim % len(sizes) for dim in dims})
    kept_dims = [dim for dim in range(len(sizes)) if dim not in reduced_dims]
    kept_inputs = [[strides[dim] for dim in kept_dims] for strides in inputs]
    kept = _collapse([sizes[dim] for dim in kept_dims], [*outputs, *kept_inputs])
    reduced_sizes = [sizes[dim] for dim in reduced_dims]
    reduced = _collapse(reduced_sizes, [[strides[dim] for dim in reduced_dims] for strides in inputs], keep_order=True)
    reach = [
        _furthest(kept[0], kept_strides) + _furthest(reduced[0], reduced_strides)
        for kept_strides, reduced_strides in zip(kept[1][len(outputs) :], reduced[1], strict=True)
    ]
    reach += [_furthest(kept[0], strides) for strides in kept[1][: len(outputs)]]
    wide = is_wide(math.prod(sizes), *reach)
    return ReductionGeometry(*(Geometry(Layout(len(part[0]), 1, wide), *part) for part in (kept, reduced)))


def is_wide(*reached: int) -> bool:
    """Whether one of the numbers takes more than 32 bits. Each is asked by itself: a dynamic-shape plan holds for calls
    in which the answers are the same, and need not know which number is the greatest.
    """
    return any(number > NARROW_LIMIT for number in reached)


def _furthest(sizes: Sequence[int], strides: Sequence[int]) -> int:
    return sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))


def _collapse(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], *, keep_order: bool = False
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Drops dimensions of size 1, orders the rest by stride, and merges neighbours that every operand steps through.

    What comes back begins with the innermost dimension.
    """
    dimensions = [(size, steps) for size, *steps in zip(sizes, *strides, strict=True) if size != 1]
    dimensions.reverse()
    if not keep_order:
        dimensions.sort(key=lambda dimension: dimension[1])  # the outputs decide
    merged: list[tuple[int, list[int]]] = []
    for size, steps in dimensions:
        if merged and all(step == inner * merged[-1][0] for step, inner in zip(steps, merged[-1][1], strict=True)):
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, steps))
    return tuple(size for size, _ in merged), tuple(
        tuple(steps[operand] for _, steps in merged) for operand in range(len(strides))
    )
