"""The index arithmetic of a call: contiguous, or strided over a number of dimensions, in 32 or 64 bits.

A kernel is specialized on a `Layout`. Sizes and strides are arguments of the kernel, so a new shape needs no new
compilation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

NARROW_LIMIT = 2**31 - 1


class RowLimits(NamedTuple):
    """The calls that are launched in rows (see `Layout.rows`).

    Args:
        shortest: minimum number of elements in a row.
        most: maximum number of rows, which are the second dimension of the launch.
    """

    shortest: int = 16
    most: int = 65535 * 4  # CUDA's limit on groups in that dimension; each has 4 rows


class TileLimits(NamedTuple):
    """The tiles that a device can use (see `Layout.tile`).

    Args:
        memory: maximum bytes for tiles; 0 for no tiles.
        side: width and height of all tiles, used where both dimensions have at least half as many elements; 0 to choose
            them by the sizes.
    """

    memory: int = 0
    side: int = 0


@dataclass(frozen=True)
class Layout:
    """The index arithmetic that a kernel is specialized on.

    Args:
        rank: number of dimensions to loop over; 0 if every operand is contiguous.
        width: elements per work item; more than 1 only if contiguous.
        wide: whether indices need 64 bits.
        inner: each operand's stride along the innermost dimension: 0, 1, or 2 for any other stride. Strides 0 and 1 are
            in the text, so compilers can vectorize. Empty unless the launch is in rows (one dimension for the innermost
            dimension, one for all others) or in tiles. In tiles, 3 is an input that is first read along the tile's
            other dimension.
        tile: empty, or (dimension, width, height) if each group computes a tile of the innermost dimension (`width`
            elements) and of `dimension` (`height` elements), along which neighbours of some inputs are neighbours in
            memory. `width` and `height` are powers of two.
    """

    rank: int = 0
    width: int = 4
    wide: bool = False
    inner: tuple[int, ...] = ()
    tile: tuple[int, int, int] | tuple[()] = ()

    @property
    def rows(self) -> bool:
        """Whether a launch has one dimension for the innermost dimension and one for all others."""
        return bool(self.inner) and not self.tile

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank must be 0 (contiguous) or a number of dimensions, got {self.rank}")
        if self.width not in (1, 2, 4, 8, 16):
            raise ValueError(f"width must be 1, 2, 4, 8 or 16, got {self.width}")
        if self.rank and self.width != 1:
            raise ValueError(f"the width of a strided layout must be 1, got {self.width}")


@dataclass(frozen=True)
class Geometry:
    """A call's layout, its sizes, and each operand's strides in elements. The innermost dimension comes first."""

    layout: Layout
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def rows(self) -> int:
        """The number of rows: the product of all sizes except the innermost."""
        return math.prod(self.sizes[1:])

    @property
    def tiles(self) -> int:
        """The number of tiles, one per group."""
        return tiles(self.layout.tile, self.sizes)


def geometry(
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    *,
    width: int = 4,
    aligned: bool = True,
    limits: RowLimits = RowLimits(),  # noqa: B008, it is immutable
    staged: Sequence[int] = (),
    tile_limits: TileLimits = TileLimits(),  # noqa: B008, it is immutable
) -> Geometry:
    """The simplest geometry that visits every element once.

    Args:
        sizes: the shape of the outputs.
        strides: for each operand, outputs first, one stride for each size; 0 where the operand is broadcast.
        width: elements per work item if every operand is contiguous.
        aligned: whether every operand is aligned for accesses to `width` elements. If not, the width is 1.
        limits: which calls that are not contiguous are launched in rows.
        staged: for each operand, the bytes of an element if it is an input, which a tile can read first; else 0.
        tile_limits: which tiles the device can use.

    Raises:
        ValueError: an operand has a wrong number of strides.
    """
    for operand in strides:
        if len(operand) != len(sizes):
            raise ValueError(f"{len(operand)} strides for {len(sizes)} sizes; a broadcast dimension has stride 0")
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


SECTOR = 32  # bytes; GPUs read at least this much from memory at a time
_MIN_TILE = 128  # elements; smaller matrices share their sectors with the next matrices of the launch


def tiles(tile: Sequence[int], sizes: Sequence[int]) -> int:
    """The number of tiles that cover `sizes`, the innermost dimension first."""
    along, width, height = tile
    others = math.prod(size for dim, size in enumerate(sizes) if dim not in (0, along))
    return -(-sizes[0] // width) * -(-sizes[along] // height) * others


def tile_pitch(tile: Sequence[int], itemsize: int) -> int:
    """The distance in local memory, in elements, between a tile's neighbours along the innermost dimension.

    It is more than the tile's height, so that neighbouring work items access different banks (of 4 bytes) along both
    dimensions.
    """
    _, width, height = tile
    return height + max(1, 4 // itemsize) * max(1, 32 // width)


def _tile(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], staged: Sequence[int], memory: int, fixed: int
) -> tuple[tuple[int, int, int] | tuple[()], tuple[int, ...]]:
    """The tile and the operands' strides, as in `Layout.tile` and `Layout.inner`; `fixed`: as `TileLimits.side`.

    Both are empty if a tile makes no input faster to read.
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
        if edge == 64 and max(through) > 2:  # 32 such elements already have more than 64 bytes
            continue
        width, height = (fixed, fixed) if fixed else (_side(sizes[0], edge), _side(sizes[along], edge))
        if width < edge:
            height = _side(sizes[along], edge * edge // width)
        elif height < edge:
            width = _side(sizes[0], edge * edge // height)
        if width * height < _MIN_TILE:
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
    """The kept dimensions (operands: outputs, then inputs) and the reduced dimensions (operands: inputs)."""

    kept: Geometry
    reduced: Geometry

    @property
    def wide(self) -> bool:
        return self.kept.layout.wide


def reduction_geometry(
    sizes: Sequence[int], dims: Sequence[int], outputs: Sequence[Sequence[int]], inputs: Sequence[Sequence[int]]
) -> ReductionGeometry:
    """The geometry of a reduction of inputs of shape `sizes` over `dims`.

    Positions in the reduced dimensions are counted row by row, whatever the order of `dims`, as in PyTorch's argmax.

    Args:
        outputs: strides of each output, one for each dimension that is kept.
        inputs: strides of each input, one for each of sizes.

    Raises:
        IndexError: a dimension is out of range.
    """
    for dim in dims:
        if not -len(sizes) <= dim < len(sizes):
            raise IndexError(f"dimension {dim} is out of range for {len(sizes)} dimensions")
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
    """Whether one of the numbers exceeds 2³¹ − 1, so that indices need 64 bits.

    Each number is compared separately. A dynamic-shape plan has a guard for the result of each comparison; taking the
    maximum first would need guards for which number is the greatest.
    """
    return any(number > NARROW_LIMIT for number in reached)


def _furthest(sizes: Sequence[int], strides: Sequence[int]) -> int:
    return sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))


def _collapse(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], *, keep_order: bool = False
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Drops dimensions of size 1, sorts the rest by stride, and merges those that every operand traverses as one.

    The returned sizes and strides begin with the innermost dimension.
    """
    dimensions = [(size, steps) for size, *steps in zip(sizes, *strides, strict=True) if size != 1]
    dimensions.reverse()
    if not keep_order:
        dimensions.sort(key=lambda dimension: dimension[1])  # by the strides of the outputs, which come first
    merged: list[tuple[int, list[int]]] = []
    for size, steps in dimensions:
        if merged and all(step == inner * merged[-1][0] for step, inner in zip(steps, merged[-1][1], strict=True)):
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, steps))
    return tuple(size for size, _ in merged), tuple(
        tuple(steps[operand] for _, steps in merged) for operand in range(len(strides))
    )
