"""Products by tiles of results, where work items run in lockstep: what products of matrices and convolutions share.

A group computes 64 × 64 results from tiles in local memory, or fewer, within the target's limits. Where there are fewer
tiles than fill the device and sums are long, groups compute parts of sums, with what their additions have lost, and
further launches add these up in their order: results are the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.target import Target
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, split, substitute

# A group of SIDE × SIDE work items computes SIDE × SIDE × PER_ITEM × PER_ITEM results, DEPTH products at a time.
PER_ITEM, DEPTH, SIDES = 4, 16, (16, 8, 4)
BLOCK = 64  # additions in a row, for each number of a vector
SHORT = 8  # sums of fewer products keep what products and additions lose
_LEAST_PART = 128  # products
_LONG, _LEAST_CHUNK = 48, 4  # parts: from when on they are added up in chunks, and of a chunk


class Summed(NamedTuple):
    """How sums of products of a dtype are computed.

    Args:
        value: the text's value_t. number: what alpha and beta are passed as. kept: what parts of sums are kept in.
        loses: whether additions round, and what they lose is kept, too.
    """

    value: torch.dtype
    number: torch.dtype
    kept: torch.dtype
    multiply_add: str
    loses: bool


def summed(dtype: torch.dtype, reduced: bool = False) -> Summed:
    """In float32 for float16 and bfloat16; integers wrap.

    Args:
        reduced: parts of sums are rounded to `dtype`.
    """
    if facts(dtype).category == "float":
        value = value_dtype(dtype)
        return Summed(value, value, dtype if reduced else value, "fma(x, y, z)", not reduced)
    wide = facts(dtype).bits == 64
    value, kept = (torch.uint64, torch.int64) if wide else (torch.uint32, torch.int32)
    return Summed(value, torch.int64, kept, "((x) * (y) + (z))", False)


def side_of(dialect: Dialect, value: torch.dtype, more: tuple[int, int] = (0, 0)) -> int | None:
    """The largest side of a group that the target can have, and has local memory for, for tiles of both operands. None
    where there is no such group, or work items are no lanes that tiles would help.

    Args:
        more: bytes beside the tiles, and for each column of a tile.
    """

    def fits(side: int) -> bool:
        tiles = 2 * DEPTH * (side * PER_ITEM + 1) * value.itemsize + more[0] + side * PER_ITEM * more[1]
        return side * side <= dialect.target.max_group_size and tiles <= dialect.target.local_memory

    return next(filter(fits, SIDES), None) if dialect.target.simt else None


class Tiles(NamedTuple):
    """Args:
    here: how many tiles of results there are.
    parts: that each sum is divided into, of `part_depth` products, a multiple of DEPTH; 1 where it is not divided.
    """

    side: int
    here: int
    parts: int
    part_depth: int

    @property
    def groups(self) -> int:
        return self.here * self.parts

    def integers(self) -> dict[str, int]:
        return {"parts": self.parts, "part_depth": self.part_depth} if self.parts > 1 else {}


def divide(
    target: Target, side: int, batch: int, rows: int, columns: int, depth: int, most: int | None = None
) -> Tiles:
    """Into as many parts as fill the device, if these are no more memory than the operands.

    Args:
        most: parts, if there is a limit.
    """
    tile = side * PER_ITEM
    count = batch * -(-rows // tile) * -(-columns // tile)
    enough = target.enough_groups_of(side * side)
    if count >= enough or depth < 2 * _LEAST_PART:
        return Tiles(side, count, 1, depth)
    parts = min(-(-enough // count), depth // _LEAST_PART, (rows + columns) * depth // (2 * rows * columns))
    if most is not None and parts > most:
        parts = most
    if parts < 2:
        return Tiles(side, count, 1, depth)
    part_depth = depth // (parts * DEPTH) * DEPTH  # and so a few more parts rather than fewer
    made = -(-depth // part_depth)
    if most is not None and made > most:
        part_depth += DEPTH
        made = -(-depth // part_depth)
    return Tiles(side, count, made, part_depth)


def tiled(tiles: Tiles, parts: Mapping[str, str]) -> str:
    """The body of a product by tiles: of each group one, or a part of its sums. The text knows `batches`, `rows`,
    `columns` and `depth`, and, where sums are divided, `part_depth`, `parts`, `sums`, and `lost` of numbers that round.

    Args:
        parts: text for
            a_along_depth, b_along_depth: whether neighbours in memory are neighbours along the depth; work items
                read them side by side.
            shared: declarations of what else the group shares.
            prepare: statements before the first tiles.
            a: the element in row i, at first + a_k; b: in column j, at first + b_k. Their places in the tile are
                a_i and b_j.
            next: statements before tiles that begin at `first`, of which the first begin at `first_of_all`.
            short: anything, where the sums are short and their numbers round.
            lost: anything, where the numbers round.
            store: a statement that takes the value VALUE of the result in row i, column j; of the tile y * SIDE +
                item_column.
    """
    side, tile = tiles.side, tiles.side * PER_ITEM
    sizes, names = ["batches", "row_tiles", "column_tiles"], ["batch", "row_tile", "column_tile"]
    total = "(lost_of[x][y] == lost_of[x][y] ? sum[x][y] + lost_of[x][y] : sum[x][y])"
    store = parts["store"].replace("VALUE", total)
    if tiles.parts > 1:
        # Groups that go through the same part are neighbours, as they read the same rows or columns.
        sizes, names = ["parts", *sizes], ["part", *names]
        at = "((part * batches + batch) * rows + i) * columns + j"
        lost = f"store_lost({at}, lost_of[x][y]);" if "lost" in parts else ""
        store = f"if (i < rows && j < columns) {{ store_sums({at}, sum[x][y]); {lost} }}"
    return substitute(
        _TILED,
        {
            **parts,
            "first": "part * part_depth" if tiles.parts > 1 else "0",
            "last": "min(depth, part * part_depth + part_depth)" if tiles.parts > 1 else "depth",
            "tile": str(tile),
            "depth": str(DEPTH),
            "block": str(BLOCK),
            "group": str(side * side),
            "side": str(side),
            "per_item": str(PER_ITEM),
            "split": split("tile", sizes, names),
            "store": store,
            "add": _ADD_EXACTLY if "short" in parts else _ADD,
        },
    )


_ADD = "block[x][y] = MULTIPLY_ADD(a_column_part[x], b_row_part[y], block[x][y]);"
_ADD_EXACTLY = "ADD_PRODUCT(value_t, sum[x][y], lost_of[x][y], a_column_part[x], b_row_part[y])"
_TILED = """
  LOCAL value_t a_tile[$depth][$tile + 1];
  LOCAL value_t b_tile[$depth][$tile + 1];
  $shared
  const index_t tile = GROUP;
  const index_t row_tiles = (rows + $tile - 1) / $tile, column_tiles = (columns + $tile - 1) / $tile;
  $split
  const int item_row = ITEM / $side, item_column = ITEM % $side;
  const bool a_along_depth = $a_along_depth, b_along_depth = $b_along_depth;
  const index_t first_of_all = $first, last = $last;
  $prepare
  value_t sum[$per_item][$per_item], lost_of[$per_item][$per_item], block[$per_item][$per_item];
  for (int x = 0; x < $per_item; ++x)
    for (int y = 0; y < $per_item; ++y) sum[x][y] = lost_of[x][y] = block[x][y] = 0;
  for (index_t first = first_of_all; first < last; first += $depth) {
    $next
    for (int e = ITEM; e < $depth * $tile; e += $group) {
      const int a_k = a_along_depth ? e % $depth : e / $tile, a_i = a_along_depth ? e / $depth : e % $tile;
      const index_t i = row_tile * $tile + a_i;
      a_tile[a_k][a_i] = i < rows && first + a_k < last ? (value_t)$a : (value_t)0;
      const int b_k = b_along_depth ? e % $depth : e / $tile, b_j = b_along_depth ? e / $depth : e % $tile;
      const index_t j = column_tile * $tile + b_j;
      b_tile[b_k][b_j] = j < columns && first + b_k < last ? (value_t)$b : (value_t)0;
    }
    BARRIER;
    for (int k = 0; k < $depth; ++k) {
      value_t a_column_part[$per_item], b_row_part[$per_item];
      for (int x = 0; x < $per_item; ++x) a_column_part[x] = a_tile[k][item_row + x * $side];
      for (int y = 0; y < $per_item; ++y) b_row_part[y] = b_tile[k][item_column + y * $side];
      for (int x = 0; x < $per_item; ++x)
        for (int y = 0; y < $per_item; ++y) $add
    }
    BARRIER;
    if ((first + $depth) % $block == 0 || first + $depth >= last)
      for (int x = 0; x < $per_item; ++x)
        for (int y = 0; y < $per_item; ++y) {
          ADD_AS(value_t, sum[x][y], lost_of[x][y], block[x][y])
          block[x][y] = 0;
        }
  }
  for (int x = 0; x < $per_item; ++x)
    for (int y = 0; y < $per_item; ++y) {
      const index_t i = row_tile * $tile + item_row + x * $side, j = column_tile * $tile + item_column + y * $side;
      $store
    }
"""


def with_c(c: torch.Tensor | None) -> str:
    """WITH_C(at), which stands before the sum of products that is stored."""
    return "(value_t)alpha * " if c is None else "(value_t)beta * (value_t)load_c(at) + (value_t)alpha * "


def factors(
    kind: Summed, c: torch.Tensor | None, alpha: int | float, beta: int | float
) -> dict[str, tuple[torch.dtype, Any]]:
    """The kernels' numbers."""
    return {"alpha": (kind.number, alpha), **({} if c is None else {"beta": (kind.number, beta)})}


def most_parts(kind: Summed, results: int, workspace: int | None) -> int | None:
    """For which there is room in so many bytes, and for chunks of them (`add_parts`)."""
    if workspace is None:
        return None
    bytes_of_each = results * kind.kept.itemsize * (2 if kind.loses else 1)
    return (workspace // bytes_of_each - 1) * _LEAST_CHUNK // (_LEAST_CHUNK + 1)


def room(kind: Summed, parts: int, results: int, device: torch.device) -> dict[str, torch.Tensor]:
    """For parts of sums, and what they have lost."""
    names = ("sums", "lost") if kind.loses else ("sums",)
    return {name: torch.empty(parts, results, dtype=kind.kept, device=device) for name in names}


def add_parts(
    dialect: Dialect,
    name: str,
    out: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    c: torch.Tensor | None = None,
    alpha: int | float = 1,
    beta: int | float = 1,
) -> list[Launch]:
    """out = beta * c + alpha * the sums of the parts `given`, which are in the order of out's four dimensions.

    A work item adds up a result, or, where these are too few, a chunk of its parts.
    """
    kind, results, launches = summed(out.dtype, "lost" not in given), out.numel(), []
    parts = given["sums"].shape[0]
    groups, enough = -(-results // dialect.target.group_size), dialect.target.enough_groups
    while groups < enough and parts >= _LONG:
        chunk = parts // min(-(-enough // groups), parts // _LEAST_CHUNK)
        chunks = -(-parts // chunk)
        added = room(kind, chunks, results, out.device)
        body = f"""
  const index_t at = item % results, first = item / results * chunk, end = min(parts, first + chunk);
  {_loop("first", "end", kind)}
  store_added_sums(item, {"sum" if kind.loses else "TOTAL(sum)"});
  {"store_added_lost(item, sum_lost);" if kind.loses else ""}
"""
        launches.append(
            LaunchSpec(
                f"{name}_sum_chunks",
                dialect,
                outputs={f"added_{one}": tensor for one, tensor in added.items()},
                inputs=given,
                integers={"results": results, "parts": parts, "chunk": chunk},
                value=kind.value,
                body=body,
                items=results * chunks,
            ).launch()
        )
        given, parts = added, chunks
    sizes, names = [f"size{d}" for d in range(4)], [f"at{d}" for d in range(4)]
    integers = {"results": results, "parts": parts, **dict(zip(sizes, out.shape, strict=True))}
    for one, tensor in {"out": out, **({} if c is None else {"c": c})}.items():
        integers |= {f"{one}_step{d}": step for d, step in enumerate(tensor.stride())}
    out_at, c_at = (" + ".join(f"{at} * {one}_step{d}" for d, at in enumerate(names)) for one in ("out", "c"))
    body = f"""
  const index_t at = item;
  {_loop("0", "parts", kind)}
  {split("at", sizes, names)}
  store_out({out_at}, WITH_C({c_at}) TOTAL(sum));
"""
    launches.append(
        LaunchSpec(
            f"{name}_sum",
            dialect,
            outputs={"out": out},
            inputs={**given, **({} if c is None else {"c": c})},
            integers=integers,
            numbers=factors(kind, c, alpha, beta),
            constants={"WITH_C(at)": with_c(c)},
            value=kind.value,
            body=body,
            items=results,
            strided={"out", "c"},
        ).launch()
    )
    return launches


def _loop(first: str, end: str, kind: Summed) -> str:
    lost = "sum_lost += load_lost(part * results + at);" if kind.loses else ""
    return f"""SUM(sum);
  for (index_t part = {first}; part < {end}; ++part) {{ ADD(sum, load_sums(part * results + at)) {lost} }}"""


def batch_start(tensor: str) -> str:
    """Where the matrix of this batch begins."""
    return f"batch / inner_batches * {tensor}_outer + batch % inner_batches * {tensor}_inner"


def store_result(i: str, j: str, value: str) -> str:
    return (
        f"if ({i} < rows && {j} < columns) store_out({batch_start('out')} + ({i}) * out_row + ({j}) * out_column, "
        f"WITH_C({batch_start('c')} + ({i}) * c_row + ({j}) * c_column) {value});"
    )
