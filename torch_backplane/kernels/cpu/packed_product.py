"""Matrix products by packed tiles on CPUs.

A work item computes a tile of results. For each block of the depth, it first packs the part of b that it needs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts
from torch_backplane.kernels.templates.source import split
from torch_backplane.kernels.templates.spelling import lane_count, turning
from torch_backplane.kernels.templates.tiles import BLOCK, SHORT, batch_start, store_result, summed

# _ROWS: candidates for the rows of a tile; the first one that leaves enough work items is used.
# _VECTORS: vectors of columns in a tile.
# _COPIED_ROWS: minimum number of rows if b's rows are not contiguous; packing b then takes as long as some rows.
_ROWS, _VECTORS, _COPIED_ROWS = (64, 32, 16, 8), 2, 32
_ROWS_AT_ONCE = 8  # rows whose sums over a block are in registers together


class Packed(NamedTuple):
    """A launch in which each group is one work item."""

    groups: int
    functions: str
    body: str


def suits(dialect: Dialect, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether this product of matrices or batches of matrices uses packed tiles."""
    lanes, (rows, columns) = lane_count(dialect, summed(out.dtype).value), out.shape[-2:]
    if dialect.target.simt or lanes == 1 or a.shape[-1] < SHORT or columns <= lanes:
        return False
    return bool(rows >= (_ROWS[-1] if b.stride(-1) == 1 else _COPIED_ROWS))


def packed(dialect: Dialect, out: torch.Tensor, b: torch.Tensor, in_rows: bool, added: bool) -> Packed:
    """The launch for `out`; out and b are as in `matmul`, with two batch dimensions.

    Args:
        in_rows: whether neighbours in the rows of the result, and of c, are neighbours in memory.
        added: whether c is added.
    """
    kind = summed(out.dtype)
    lanes, (rows, columns) = lane_count(dialect, kind.value), out.shape[-2:]
    column_tiles = math.prod(out.shape[:-2]) * -(-columns // (_VECTORS * lanes))
    tile_rows = _tile_rows(dialect, column_tiles, rows)
    along = "row" if b.stride(3) == 1 else "column" if b.stride(2) == 1 else ""
    functions = turning("lanes_turn", "value_t_lanes", lanes, facts(kind.value).bits) if along == "column" else ""
    body = _body(tile_rows, along, in_rows, kind.loses, added)
    return Packed(column_tiles * -(-rows // tile_rows), functions, body)


def _tile_rows(dialect: Dialect, column_tiles: int, rows: int) -> int:
    """The number of rows of a tile, if there are `column_tiles` tiles next to each other."""
    enough = dialect.target.enough_groups
    return next((one for one in _ROWS if column_tiles * -(-rows // one) >= enough), _ROWS[-1])


def _body(tile_rows: int, along: str, in_rows: bool, loses: bool, added: bool) -> str:
    """The body of the kernel.

    Args:
        along: "row" or "column" if neighbours in b's rows or columns are neighbours in memory, else "".
        in_rows: whether neighbours in the rows of the result, and of c, are neighbours in memory.
        loses: whether sums keep the rounding errors of additions.
        added: whether c is added.
    """
    rows, vectors = range(_ROWS_AT_ONCE), range(_VECTORS)
    each = [(x, v) for x in rows for v in vectors]
    tile = f"({_VECTORS} * LANES)"
    number = f"((value_t*)packed)[k * {tile} + lane]"
    copied = f"""for (int lane = 0; lane < {tile}; ++lane) {{
        const index_t at = b_at + first * b_row + min(j + lane, columns - 1) * b_column;
        for (int k = 0; k < count; ++k) {number} = (value_t)load_b(at + k * b_row);
      }}"""
    if along == "column":
        # Squares are transposed in registers; the rest of the depth is copied element by element.
        copied = f"""int turned = 0;
      for (; turned + LANES <= count; turned += LANES)
        for (int v = 0; v < {_VECTORS}; ++v) {{
          value_t_lanes square[LANES];
          for (int lane = 0; lane < LANES; ++lane)
            square[lane] = load_b_lanes(b_at + min(j + v * LANES + lane, columns - 1) * b_column + first + turned);
          lanes_turn(square);
          for (int k = 0; k < LANES; ++k) packed[turned + k][v] = square[k];
        }}
      {copied.replace("int k = 0", "int k = turned")}"""
    if along == "row":
        at = "b_at + (first + k) * b_row + j"
        loads = " ".join(f"packed[k][{v}] = load_b_lanes({at} + {v} * LANES);" for v in vectors)
        copied = f"if (j + {tile} <= columns) {{ for (int k = 0; k < count; ++k) {{ {loads} }} }} else {copied}"
    steps = "\n".join(
        f"          {{ const value_t_lanes one = LANES_OF((value_t)load_a_from(a_row{x}, k * a_column)); "
        + " ".join(f"block{x}_{v} = MULTIPLY_ADD(one, b_lanes{v}, block{x}_{v});" for v in vectors)
        + " }"
        for x in rows
    )
    sums = "sums[x + {x}][{v}]"
    add = f"{sums} += block{{x}}_{{v}};"
    if loses:
        add = f"ADD_AS(value_t_lanes, {sums}, lost[x + {{x}}][{{v}}], block{{x}}_{{v}})"
    total = "(lost[x][{v}] == lost[x][{v}] ? sums[x][{v}] + lost[x][{v}] : sums[x][{v}])" if loses else "sums[x][{v}]"
    at_c = f"{batch_start('c')} + (i + x) * c_row + j + {{v}} * LANES"
    of_c = f"LANES_OF((value_t)beta) * load_c_lanes({at_c}) + " if added else ""
    stores = " ".join(
        f"STORE_RESULTS(i + x, j + {v} * LANES, {of_c.format(v=v)}LANES_OF((value_t)alpha) * {total.format(v=v)});"
        for v in vectors
    )
    singly = f"""for (int lane = 0; lane < {tile}; ++lane) {{
      {store_result("i + x", "j + lane", "((value_t*)sums)[x * " + tile + " + lane]")}
    }}"""
    totals = " ".join(f"sums[x][{v}] = {total.format(v=v)};" for v in vectors) if loses else ""
    return f"""
  const index_t row_tiles = (rows + {tile_rows - 1}) / {tile_rows}, column_tiles = (columns + {tile} - 1) / {tile};
  const index_t place = GROUP;
  if (place >= batches * column_tiles * row_tiles) return;
  {split("place", ["batches", "column_tiles", "row_tiles"], ["batch", "column_tile", "row_tile"])}
  const index_t i = row_tile * {tile_rows}, j = column_tile * {tile};
  const index_t a_batch = {batch_start("a")}, b_at = {batch_start("b")};
  const int here = (int)min((index_t){tile_rows}, rows - i);
  value_t_lanes packed[{BLOCK}][{_VECTORS}], sums[{tile_rows}][{_VECTORS}];
  {f"value_t_lanes lost[{tile_rows}][{_VECTORS}];" if loses else ""}
  for (int x = 0; x < {tile_rows}; ++x)
    for (int v = 0; v < {_VECTORS}; ++v) {{
      sums[x][v] = LANES_OF(0);
      {"lost[x][v] = LANES_OF(0);" if loses else ""}
    }}
  for (index_t first = 0; first < depth; first += {BLOCK}) {{
    const int count = (int)min((index_t){BLOCK}, depth - first);
    {copied}
    const a_pointer a_first = a + a_batch + first * a_column;
    for (int x = 0; x < here; x += {_ROWS_AT_ONCE}) {{
      {" ".join(f"const a_pointer a_row{x} = a_first + min(i + x + {x}, rows - 1) * a_row;" for x in rows)}
      {" ".join(f"value_t_lanes block{x}_{v} = LANES_OF(0);" for x, v in each)}
      for (int k = 0; k < count; ++k) {{
        {" ".join(f"const value_t_lanes b_lanes{v} = packed[k][{v}];" for v in vectors)}
{steps}
      }}
      {" ".join(add.format(x=x, v=v) for x, v in each)}
    }}
  }}
  for (int x = 0; x < here; ++x) {{
    {f"if (j + {tile} <= columns) {{ {stores} continue; }}" if in_rows else ""}
    {totals}
    {singly}
  }}
"""
