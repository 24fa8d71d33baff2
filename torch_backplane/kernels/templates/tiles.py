"""Tiled products on SIMT targets: the part that matrix products and convolutions share.

A work group computes 64 × 64 results from tiles of the operands in local memory, or fewer if the target's limits
require it. Where the dialect has matrix instructions for a dtype (`Dialect.matrix_functions`), subgroups use them, and
a tile has 128 × 128 results if there are enough of these (`matrix_tiles.py`). If there are too few tiles to fill the
device, and sums are long, sums are split (split-k): work groups compute partial sums and their rounding errors, and
further launches add these up in a fixed order. So results are the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.target import Target
from torch_backplane.kernels.templates import matrix_tiles
from torch_backplane.kernels.templates.fused_operations import Operations, stored_at, stored_results
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, extent, split, substitute

# A work group of side × side work items computes side × side × PER_ITEM × PER_ITEM results, DEPTH products at a time.
PER_ITEM, DEPTH, SIDES = 4, 16, (16, 8, 4)
BLOCK = 64  # consecutive additions without error compensation, for each element of a vector
SHORT = 8  # sums of fewer products keep the rounding errors of products and additions
_MIN_PART = 128  # minimum products of a part
_LONG, _MIN_CHUNK = 48, 4  # minimum number of parts to add up in chunks; minimum parts of a chunk


class Summed(NamedTuple):
    """How sums of products of a dtype are computed.

    Args:
        value: dtype of `value_t`.
        number: dtype of the alpha and beta arguments.
        kept: dtype of partial sums in memory.
        multiply_add: C expression of x * y + z.
        loses: whether partial sums are stored with their rounding errors.
    """

    value: torch.dtype
    number: torch.dtype
    kept: torch.dtype
    multiply_add: str
    loses: bool


def summed(dtype: torch.dtype, reduced: bool = False, by_matrices: bool = False) -> Summed:
    """Returns how sums of products of `dtype` are computed: float16 and bfloat16 in float32; integers wrap.

    Args:
        reduced: partial sums are rounded to `dtype`.
        by_matrices: matrix instructions compute partial sums, without rounding errors.
    """
    if facts(dtype).category == "float":
        value = value_dtype(dtype)
        return Summed(value, value, dtype if reduced else value, "fma(x, y, z)", not reduced and not by_matrices)
    wide = facts(dtype).bits == 64
    value, kept = (torch.uint64, torch.int64) if wide else (torch.uint32, torch.int32)
    return Summed(value, torch.int64, kept, "((x) * (y) + (z))", False)


class Tile(NamedTuple):
    """What a work group computes.

    Args:
        side: number of its rows, and of its columns.
        items: work items of the group.
        depth: products between two barriers.
        functions: `Dialect.matrix_functions`; empty if work items multiply elements.
        element: dtype of the operands, if subgroups multiply matrices.
    """

    side: int
    items: int
    depth: int = DEPTH
    functions: str = ""
    element: torch.dtype | None = None

    def local_bytes(self, value: torch.dtype) -> int:
        """Bytes of local memory for tiles of the operands and, with matrix instructions, for results."""
        return matrix_tiles.local_bytes(self.side) if self.element else 2 * DEPTH * (self.side + 1) * value.itemsize

    @property
    def types(self) -> dict[str, torch.dtype]:
        """Types of the kernel text."""
        return {} if self.element is None else {"element_t": self.element}


def possible_tiles(
    dialect: Dialect, value: torch.dtype, element: torch.dtype | None, more: tuple[int, int] = (0, 0)
) -> list[Tile]:
    """Returns the tiles that fit into the target's local memory and group size limit, the largest first.

    There are none if the target is not SIMT.

    Args:
        value: dtype of sums.
        element: the dtype of both operands and of the result; None if these differ.
        more: additional bytes of local memory: per work group, and per column of a tile.
    """
    target = dialect.target
    if not target.simt:
        return []

    def fits(tile: Tile) -> bool:
        needed = tile.local_bytes(value) + more[0] + tile.side * more[1]
        return tile.items <= target.max_group_size and needed <= target.local_memory

    if element is not None and (functions := dialect.matrix_functions(element)):
        by_matrices = (
            Tile(side, matrix_tiles.items(side), matrix_tiles.DEPTH, functions, element) for side in matrix_tiles.SIDES
        )
        if found := list(filter(fits, by_matrices)):
            return found
    return list(filter(fits, (Tile(side * PER_ITEM, side * side) for side in SIDES)))


def choose_tile(target: Target, possible: Sequence[Tile], batch: int, rows: int, columns: int) -> Tile:
    """Returns the largest tile; with matrix instructions, the largest of which there are enough to fill half of the
    device, or else the smallest."""

    def is_enough(tile: Tile) -> bool:
        count = batch * -(-rows // tile.side) * -(-columns // tile.side)
        return tile.element is None or count * 2 >= target.enough_groups_of(tile.items)

    return next(filter(is_enough, possible), possible[-1])


class Tiles(NamedTuple):
    """The tiles of a product.

    Args:
        tile: each of them.
        here: number of result tiles.
        parts: number of parts of each sum; 1 if sums are not split.
        part_depth: products of a part; a multiple of the tile's depth if sums are split.
    """

    tile: Tile
    here: int
    parts: int
    part_depth: int

    @property
    def groups(self) -> int:
        return self.here * self.parts

    def integers(self) -> dict[str, int]:
        return {"parts": self.parts, "part_depth": self.part_depth} if self.parts > 1 else {}


def divide(
    target: Target, tile: Tile, batch: int, rows: int, columns: int, depth: int, most: int | None = None
) -> Tiles:
    """Splits sums into enough parts to fill the device, if the partial sums take no more memory than the operands.

    Args:
        most: maximum number of parts, if there is a limit.
    """
    count = batch * -(-rows // tile.side) * -(-columns // tile.side)
    enough = target.enough_groups_of(tile.items)
    if count >= enough or depth < 2 * _MIN_PART:
        return Tiles(tile, count, 1, depth)
    parts = min(-(-enough // count), depth // _MIN_PART, (rows + columns) * depth // (2 * rows * columns))
    if most is not None and parts > most:
        parts = most
    if parts < 2:
        return Tiles(tile, count, 1, depth)
    part_depth = depth // (parts * tile.depth) * tile.depth  # rounded down: rather more parts than fewer
    made = -(-depth // part_depth)
    if most is not None and made > most:
        part_depth += tile.depth
        made = -(-depth // part_depth)
    return Tiles(tile, count, made, part_depth)


def tiled(tiles: Tiles, parts: Mapping[str, str]) -> str:
    """Returns the body of a tiled product. Each work group computes one result tile, or one part of its sums.

    The kernel needs the integers `batches`, `rows`, `columns` and `depth`. If sums are split, it also needs the
    integers `part_depth` and `parts`, the output `sums`, and the output `lost` if `parts` has that key.

    Args:
        parts: text for
            a_along_depth, b_along_depth: C condition, whether the operand is contiguous along the depth. Consecutive
                work items then read consecutive elements along the depth.
            shared: declarations of additional local memory.
            prepare: statements before the first tiles.
            a: a statement that assigns `a_element`, the element of a in row i at depth first + a_k. Its row in the tile
                is a_i. Tiles have zeros beyond the operands, where the statement does not run.
            b: likewise, `b_element` in column j at depth first + b_k. Its column in the tile is b_j.
            a_line, b_line: for matrix instructions, instead of `a` or `b`: the offset of 8 consecutive elements that
                one instruction copies. Each 8 elements from a multiple of 8 on along the operand's contiguous dimension
                are all in the operand, or none is, and begin at a multiple of 16 bytes.
            next: statements before the operand tiles from depth `first` on are loaded; the first tiles are at
                `first_of_all`.
            short: present, with any text, for short floating-point sums, which keep the errors of each product.
            lost: present, with any text, if partial sums are stored with their rounding errors (`Summed.loses`).
            store: a statement that stores VALUE, the result in row i and column j. Its column in the tile is tile_j.
    """
    tile = tiles.tile
    sizes, names = ["batches", "row_tiles", "column_tiles"], ["batch", "row_tile", "column_tile"]
    whole = "(lost_of[x][y] == lost_of[x][y] ? sum[x][y] + lost_of[x][y] : sum[x][y])"
    sum_of, value = ("sum[x][y]", whole) if tile.element is None else ("results[subgroup][e]",) * 2
    store = parts["store"].replace("VALUE", value)
    if tiles.parts > 1:
        # Consecutive work groups compute the same part of different tiles, as they read the same rows or columns.
        sizes, names = ["parts", *sizes], ["part", *names]
        at = "((part * batches + batch) * rows + i) * columns + j"
        lost = f"store_lost({at}, lost_of[x][y]);" if "lost" in parts else ""
        store = f"if (i < rows && j < columns) {{ store_sums({at}, {sum_of}); {lost} }}"
    parts = {
        **parts,
        "first": "part * part_depth" if tiles.parts > 1 else "0",
        "last": "min(depth, part * part_depth + part_depth)" if tiles.parts > 1 else "depth",
        "tile": str(tile.side),
        "depth": str(tile.depth),
        "group": str(tile.items),
        "split": split("tile", sizes, names),
        "store": store,
    }
    if tile.element is not None:
        return matrix_tiles.tiled(tile.side, parts)
    more = {"block": str(BLOCK), "side": str(tile.side // PER_ITEM), "per_item": str(PER_ITEM)}
    return substitute(_TILED, {**parts, **more, "add": _ADD_EXACTLY if "short" in parts else _ADD})


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
      value_t a_element = 0, b_element = 0;
      if (i < rows && first + a_k < last) { $a }
      a_tile[a_k][a_i] = a_element;
      const int b_k = b_along_depth ? e % $depth : e / $tile, b_j = b_along_depth ? e / $depth : e % $tile;
      const index_t j = column_tile * $tile + b_j;
      if (j < columns && first + b_k < last) { $b }
      b_tile[b_k][b_j] = b_element;
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
      const int tile_j = item_column + y * $side;
      const index_t i = row_tile * $tile + item_row + x * $side, j = column_tile * $tile + tile_j;
      $store
    }
"""


def with_c(c: torch.Tensor | None) -> str:
    """Returns the text of the macro WITH_C(at), a prefix to the sum of products: beta * c + alpha * …."""
    return "(value_t)alpha * " if c is None else "(value_t)beta * (value_t)load_c(at) + (value_t)alpha * "


def factors(
    kind: Summed, c: torch.Tensor | None, alpha: int | float, beta: int | float
) -> dict[str, tuple[torch.dtype, Any]]:
    """Returns alpha and beta as the `numbers` of a launch."""
    return {"alpha": (kind.number, alpha), **({} if c is None else {"beta": (kind.number, beta)})}


def max_parts(kind: Summed, results: int, workspace: int | None) -> int | None:
    """Returns how many parts fit into `workspace` bytes, with room for the chunks of `add_parts`; None: no limit."""
    if workspace is None:
        return None
    bytes_of_each = results * kind.kept.itemsize * (2 if kind.loses else 1)
    return (workspace // bytes_of_each - 1) * _MIN_CHUNK // (_MIN_CHUNK + 1)


def room(kind: Summed, parts: int, results: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Allocates partial sums and, if `kind.loses`, their rounding errors."""
    names = ("sums", "lost") if kind.loses else ("sums",)
    return {name: torch.empty(parts, results, dtype=kind.kept, device=device) for name in names}


class PartialSums(NamedTuple):
    """Partial sums in memory: of which kind, and the tensors of `room`."""

    kind: Summed
    tensors: Mapping[str, torch.Tensor]


def add_parts(
    dialect: Dialect,
    name: str,
    out: torch.Tensor,
    partial: PartialSums,
    c: torch.Tensor | None = None,
    scales: tuple[int | float, int | float] = (1, 1),
    epilogue: Operations | None = None,
) -> list[Launch]:
    """Computes out = beta * c + alpha * (sum of the partial sums); `scales` are alpha and beta.

    Partial sums are in the order of out's four dimensions. A work item adds up all parts of a result, or one chunk of
    them if there are too few results to fill the device. With an epilogue, only out's sizes and dtype count,
    and if it is flat, out's strides.
    """
    kind, given = partial
    results, launches = out.numel(), []
    by_row = epilogue is not None and not epilogue.flat
    stored = (stored_results if by_row else stored_at)(dialect, out, epilogue)
    parts = given["sums"].shape[0]
    groups, enough = -(-results // dialect.target.group_size), dialect.target.enough_groups
    while groups < enough and parts >= _LONG:
        chunk = parts // min(-(-enough // groups), parts // _MIN_CHUNK)
        chunks = -(-parts // chunk)
        added = room(kind, chunks, results, given["sums"].device)
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
    strided = {**({} if by_row else {"out": out}), **({} if c is None else {"c": c})}
    for one, tensor in strided.items():
        integers |= {f"{one}_step{d}": step for d, step in enumerate(tensor.stride())}
    out_at, c_at = (" + ".join(f"{at} * {one}_step{d}" for d, at in enumerate(names)) for one in ("out", "c"))
    value = f"WITH_C({c_at}) TOTAL(sum)"
    store = f"STORE_AT({out_at}, {value});"
    if by_row:
        place = "const index_t batch = at0 * size1 + at1, rows = size2, columns = size3;"
        store = f"{place} STORE_RESULT(at2, at3, {value})"
    body = f"""
  const index_t at = item;
  {_loop("0", "parts", kind)}
  {split("at", sizes, names)}
  {store}
"""
    launches.append(
        LaunchSpec(
            f"{name}_sum",
            dialect,
            outputs=stored.outputs,
            inputs={**given, **({} if c is None else {"c": c}), **stored.inputs},
            integers=integers,
            numbers={**factors(kind, c, *scales), **stored.numbers},
            types=stored.types,
            functions=stored.functions,
            constants={"WITH_C(at)": with_c(c)},
            value=kind.value,
            body=body,
            items=results,
            strided={"c", *stored.outputs, *stored.inputs},
            reached=[extent(out)],
        ).launch()
    )
    return launches


def _loop(first: str, end: str, kind: Summed) -> str:
    lost = "sum_lost += load_lost(part * results + at);" if kind.loses else ""
    return f"""SUM(sum);
  for (index_t part = {first}; part < {end}; ++part) {{ ADD(sum, load_sums(part * results + at)) {lost} }}"""


def batch_start(tensor: str) -> str:
    """Returns an expression for the offset of the matrix of the current batch."""
    return f"batch / inner_batches * {tensor}_outer + batch % inner_batches * {tensor}_inner"


def store_result(i: str, j: str, value: str) -> str:
    """Returns a statement that stores a result, if there is one in row i and column j (`fused_operations.py`)."""
    at = f"{batch_start('c')} + ({i}) * c_row + ({j}) * c_column"
    return f"if ({i} < rows && {j} < columns) {{ STORE_RESULT({i}, {j}, WITH_C({at}) {value}); }}"
