"""Convolutions as implicit matrix products (implicit GEMM) on SIMT targets.

A convolution, its gradients, and a transposed convolution sum products of two tensors over channels (or images) and
positions in a window (or in an image). All of them compute

    out[g, i, j] = bias[g, i] + sum over k of a[g, i, k] * b[g, k, j]

where g is a group of channels. j and k each consist of one coordinate for channels or images and one for each spatial
dimension; together they determine the position of the element of b, which is 0 outside the image. A work group keeps
the positions of its tiles' rows and columns in local memory. With few rows and products, each work item computes one
result by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.templates.fused_operations import Operations, joined, loaded_operand, stored_at
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, extent, named, split
from torch_backplane.kernels.templates.tiles import (
    BLOCK,
    PartialSums,
    Tile,
    add_parts,
    choose_tile,
    divide,
    max_parts,
    possible_tiles,
    room,
    summed,
    tiled,
)
from torch_backplane.kernels.templates.unfold import Windows

_FEW_ROWS, _FEW_PRODUCTS = 4, 256
_TABLE = 64  # rows of b whose positions a work group keeps; a multiple of DEPTH
_INDEX = 8  # bytes of an index, at most


@dataclass(frozen=True)
class IndexMap:
    """A mapping of a linear index (j or k) to positions in b.

    The index has one coordinate for channels or images, then one for each spatial dimension.

    Args:
        sizes: of the coordinates.
        outer: stride of b along the first coordinate.
        moves, starts: along each spatial dimension, the position is start + move * coordinate.
    """

    sizes: tuple[int, ...]
    outer: int
    moves: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Sums:
    """The sums that `gathered` computes.

    Args:
        groups: number of channel groups.
        rows: rows of a and out in each group.
        k, j: the mappings of the summed index and of the columns.
        a_group, b_group, out_group: strides from one channel group to the next.
        a_row, out_row: strides from one row to the next.
        a_steps, out_steps: strides of a along k's coordinates, and of out along j's.
        image: spatial sizes of b.
        image_steps: spatial strides of b.
    """

    groups: int
    rows: int
    k: IndexMap
    j: IndexMap
    a_group: int
    a_row: int
    a_steps: tuple[int, ...]
    b_group: int
    image: tuple[int, ...]
    image_steps: tuple[int, ...]
    out_group: int
    out_row: int
    out_steps: tuple[int, ...]
    along_depth: bool  # whether b is contiguous along k instead of j

    @property
    def rank(self) -> int:
        return len(self.image)

    def integers(self) -> dict[str, int]:
        found = {"batches": self.groups, "rows": self.rows, "columns": self.j.count, "depth": self.k.count}
        found |= {"a_group": self.a_group, "a_row": self.a_row, "b_group": self.b_group}
        found |= {"out_group": self.out_group, "out_row": self.out_row}
        for name, axis in (("k", self.k), ("j", self.j)):
            found |= {f"{name}_outer": axis.outer, **named(f"{name}_size", axis.sizes)}
            found |= {**named(f"{name}_move", axis.moves), **named(f"{name}_start", axis.starts)}
        found |= {**named("a_step", self.a_steps), **named("out_step", self.out_steps)}
        return found | {**named("image", self.image), **named("image_step", self.image_steps)}


def forward(values: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, groups: int, w: Windows) -> Sums:
    """Describes a convolution: values[n, channel, place] = Σ weight[channel, c, *at] * image[n, c, *(at in window)].

    A column is a window position in an image of the batch.
    """
    channels, of_group = weight.shape[0] // groups, weight.shape[1]
    return Sums(
        groups=groups,
        rows=channels,
        k=IndexMap((of_group, *w.window), image.stride(1), w.dilation, _none(w)),
        j=IndexMap((image.shape[0], *w.places), image.stride(0), w.stride, _before(w)),
        a_group=channels * weight.stride(0),
        a_row=weight.stride(0),
        a_steps=weight.stride()[1:],
        b_group=of_group * image.stride(1),
        image=w.image,
        image_steps=image.stride()[2:],
        out_group=channels * values.stride(1),
        out_row=values.stride(1),
        out_steps=(values.stride(0), *values.stride()[2:]),
        along_depth=False,
    )


def of_image(image: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, groups: int, w: Windows) -> Sums:
    """Describes the image's gradient for stride 1: for each element the sum over the windows that cover it."""
    channels, of_group = weight.shape[0] // groups, weight.shape[1]
    return Sums(
        groups=groups,
        rows=of_group,
        k=IndexMap((channels, *w.window), values.stride(1), tuple(-apart for apart in w.dilation), _none(w)),
        j=IndexMap((image.shape[0], *w.image), values.stride(0), (1,) * w.rank, w.padding),
        a_group=channels * weight.stride(0),
        a_row=weight.stride(1),
        a_steps=(weight.stride(0), *weight.stride()[2:]),
        b_group=channels * values.stride(1),
        image=w.places,
        image_steps=values.stride()[2:],
        out_group=of_group * image.stride(1),
        out_row=image.stride(1),
        out_steps=(image.stride(0), *image.stride()[2:]),
        along_depth=False,
    )


def of_weight(weight: torch.Tensor, values: torch.Tensor, image: torch.Tensor, groups: int, w: Windows) -> Sums:
    """Describes the weight's gradient: the sum over all window positions of all images."""
    channels, of_group = weight.shape[0] // groups, weight.shape[1]
    return Sums(
        groups=groups,
        rows=channels,
        k=IndexMap((image.shape[0], *w.places), image.stride(0), w.stride, _before(w)),
        j=IndexMap((of_group, *w.window), image.stride(1), w.dilation, _none(w)),
        a_group=channels * values.stride(1),
        a_row=values.stride(1),
        a_steps=(values.stride(0), *values.stride()[2:]),
        b_group=of_group * image.stride(1),
        image=w.image,
        image_steps=image.stride()[2:],
        out_group=channels * weight.stride(0),
        out_row=weight.stride(0),
        out_steps=weight.stride()[1:],
        along_depth=True,
    )


def _none(w: Windows) -> tuple[int, ...]:
    return (0,) * w.rank


def _before(w: Windows) -> tuple[int, ...]:
    return tuple(-pad for pad in w.padding)


def can_gather(dialect: Dialect, dtype: torch.dtype) -> bool:
    """Whether the target has enough local memory for `gathered` with three spatial dimensions. False if not SIMT."""
    return bool(possible_tiles(dialect, summed(dtype).value, dtype, _tables(3)))


def _tables(rank: int) -> tuple[int, int]:
    """Returns the bytes of local memory for the positions of rows of b, and per column of its tiles."""
    return _TABLE * (2 + rank) * _INDEX, (2 + rank) * _INDEX


def gathered(
    dialect: Dialect,
    out: torch.Tensor,
    factors: tuple[torch.Tensor, torch.Tensor],
    sums: Sums,
    bias: torch.Tensor | None = None,
    workspace: int | None = None,
    epilogue: Operations | None = None,
) -> list[Launch]:
    """Computes out as `sums` describes.

    Args:
        out: the results as (groups, rows, first coordinate of j, other coordinates of j), with any strides. With an
            epilogue, only its sizes, strides and dtype count.
        factors: a and b.
        bias: one number per group and row.
        workspace: maximum bytes for partial sums, if there is a limit.
        epilogue: what the kernel computes instead of storing the results.
    """
    a, b = factors
    value = summed(out.dtype).value
    element = out.dtype if a.dtype == b.dtype == out.dtype else None
    possible = possible_tiles(dialect, value, element, _tables(3))
    tile = choose_tile(dialect.target, possible, sums.groups, sums.rows, sums.j.count)
    kind = summed(out.dtype, by_matrices=tile.element is not None)
    loaded = joined(loaded_operand(dialect, name, one, None, tile.element) for name, one in (("a", a), ("b", b)))
    functions = tile.functions + loaded.functions
    spec = partial(LaunchSpec, dialect=dialect, value=kind.value)
    with_bias = {} if bias is None else {"bias": bias}
    made = stored_at(dialect, out, epilogue)
    spec_of_results = partial(
        spec,
        outputs=made.outputs,
        inputs={"a": a, "b": b, **with_bias, **made.inputs},
        numbers=made.numbers,
        types=made.types,
        functions=made.functions,
        strided={"a", "b", *made.outputs, *made.inputs},
        reached=[extent(out)],
    )
    suffix = "" if epilogue is None else "_epilogue"
    integers = sums.integers()
    if sums.rows <= _FEW_ROWS and sums.k.count <= _FEW_PRODUCTS:
        alone = spec_of_results(
            f"convolution{sums.rank}_alone{suffix}",
            integers=integers,
            body=_alone(sums.rank, bias is not None),
            items=sums.groups * sums.rows * sums.j.count,
        ).launch()
        return [alone]
    constants = {"MULTIPLY_ADD(x, y, z)": kind.multiply_add}
    most = max_parts(kind, out.numel(), workspace)
    tiles = divide(dialect.target, tile, sums.groups, sums.rows, sums.j.count, sums.k.count, most)
    text = _text(sums.rank, tile, sums.along_depth, bias is not None, tiles.parts > 1)
    if tiles.parts == 1:
        whole = spec_of_results(
            f"convolution{sums.rank}{suffix}",
            integers=integers,
            types={**tile.types, **made.types},
            functions=functions + made.functions,
            body=tiled(tiles, text),
            groups=tiles.groups,
            constants=constants,
            group_size=tile.items,
        ).launch()
        return [whole]
    parts = room(kind, tiles.parts, out.numel(), b.device)
    first = spec(
        f"convolution{sums.rank}_parts",
        outputs=parts,
        inputs={"a": a, "b": b},
        integers={**integers, **tiles.integers()},
        body=tiled(tiles, {**text, "lost": ""} if kind.loses else text),
        groups=tiles.groups,
        strided={"a", "b"},
        constants=constants,
        group_size=tile.items,
        types=tile.types,
        functions=functions,
    ).launch()
    added = None if bias is None else bias.view(sums.groups, sums.rows, 1, 1).expand(out.shape)
    return [first, *add_parts(dialect, "convolution", out, PartialSums(kind, parts), added, epilogue=epilogue)]


def _places(axis: str, rank: int) -> list[str]:
    return [f"{axis}_at{d}" for d in range(rank)]


def _coordinates(axis: str, rank: int) -> str:
    """Returns statements that declare the coordinates of index `axis`, and its positions along spatial dimensions."""
    names = [f"{axis}{d}" for d in range(rank + 1)]
    lines = [split(axis, [f"{axis}_size{d}" for d in range(rank + 1)], names)]
    lines += [
        f"const index_t {place} = {axis}{d + 1} * {axis}_move{d} + {axis}_start{d};"
        for d, place in enumerate(_places(axis, rank))
    ]
    return " ".join(lines)


def _sum(terms: Sequence[str]) -> str:
    return " + ".join(terms)


def _from(axis: str, rank: int) -> str:
    """Returns an expression for the offset in b that index `axis` adds."""
    return _sum([f"{axis}0 * {axis}_outer", *(f"{at} * image_step{d}" for d, at in enumerate(_places(axis, rank)))])


def _steps(operand: str, axis: str, rank: int) -> str:
    return _sum([f"{axis}{d} * {operand}_step{d}" for d in range(rank + 1)])


def _text(rank: int, tile: Tile, along_depth: bool, with_bias: bool, divided: bool) -> dict[str, str]:
    """Returns the parts for `tiled`. If sums are split (`divided`), `tiled` stores the partial sums itself."""
    tables = [f"{name}[{_TABLE}]" for name in ("k_from", "a_from", *(f"k_place{d}" for d in range(rank)))]
    tables += [
        f"{name}[{tile.side}]"
        for name in ("j_from", *([] if divided else ["j_out"]), *(f"j_place{d}" for d in range(rank)))
    ]
    keep_k, keep_j = (
        " ".join(f"{axis}_place{d}[{index}] = {at};" for d, at in enumerate(_places(axis, rank)))
        for axis, index in (("k", "e"), ("j", "ITEM"))
    )

    next_rows = f"""const int row = (int)((first - first_of_all) % {_TABLE});
    if (row == 0) {{
      for (int e = ITEM; e < {_TABLE}; e += {tile.items}) {{
        const index_t k = min(first + e, depth - 1);
        {_coordinates("k", rank)}
        k_from[e] = {_from("k", rank)};
        a_from[e] = {_steps("a", "k", rank)};
        {keep_k}
      }}
      BARRIER;
    }}"""
    inside = " && ".join(
        f"k_place{d}[row + b_k] + j_place{d}[b_j] >= 0 && k_place{d}[row + b_k] + j_place{d}[b_j] < image{d}"
        for d in range(rank)
    )
    bias = "load_bias(batch * rows + i) + " if with_bias else ""
    return {
        "a_along_depth": "true",
        "b_along_depth": "true" if along_depth else "false",
        "shared": f"LOCAL index_t {', '.join(tables)};",
        "prepare": f"""
  if (ITEM < {tile.side}) {{
    const index_t j = min(column_tile * {tile.side} + ITEM, columns - 1);
    {_coordinates("j", rank)}
    j_from[ITEM] = batch * b_group + {_from("j", rank)};
    {"" if divided else f"j_out[ITEM] = batch * out_group + {_steps('out', 'j', rank)};"}
    {keep_j}
  }}""",
        "a": "LOAD_a(batch * a_group + i * a_row + a_from[row + a_k], a_element)",
        "b": f"if ({inside}) {{ LOAD_b(k_from[row + b_k] + j_from[b_j], b_element) }}",
        "next": next_rows,
        "store": f"""if (i < rows && j < columns)
        STORE_AT(j_out[tile_j] + i * out_row, {bias}VALUE);""",
    }


def _alone(rank: int, with_bias: bool) -> str:
    loops = " ".join(
        f"for (index_t k{d} = 0; k{d} < k_size{d}; ++k{d}) {{ {_inside(d - 1)}" for d in range(1, rank + 1)
    )
    at = [f"at{d} * image_step{d}" for d in range(rank)]
    return f"""
  {split("item", ["batches", "rows", "columns"], ["group", "i", "j"])}
  {_coordinates("j", rank)}
  const index_t a_at = group * a_group + i * a_row, b_at = group * b_group + j0 * j_outer;
  SUM(sum);
  value_t block = 0;
  int left = {BLOCK};
  for (index_t k0 = 0; k0 < k_size0; ++k0) {{ {loops}
    block = fma((value_t)load_a(a_at + {_steps("a", "k", rank)}),
      (value_t)load_b(b_at + k0 * k_outer + {_sum(at)}), block);
    if (--left == 0) {{ ADD(sum, block) block = 0; left = {BLOCK}; }}
  {"}" * (rank + 1)}
  ADD(sum, block)
  STORE_AT(group * out_group + i * out_row + {_steps("out", "j", rank)},
    {"load_bias(group * rows + i) + " if with_bias else ""}TOTAL(sum));
"""


def _inside(d: int) -> str:
    """Returns statements that skip positions outside the image along dimension d."""
    return (
        f"const index_t at{d} = j_at{d} + k{d + 1} * k_move{d} + k_start{d}; "
        f"if (at{d} < 0 || at{d} >= image{d}) continue;"
    )
