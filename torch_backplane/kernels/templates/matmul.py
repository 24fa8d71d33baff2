"""Matrix products of any layout: out = beta * c + alpha * a @ b, batched.

Three forms. Where work items run in lockstep (`Target.simt`) `tiled`: a group computes 64 × 64 results from tiles in
local memory, or fewer, within the target's limits. Elsewhere each item computes a block of results in registers:
`outer` has a vector along a row of b and needs no order of a, `inner` has vectors along the summed dimension of both.

All add up the products of a block of the depth, and then the blocks, with what these additions lose: a sum's rounding
error grows with the longest chain of additions.
"""

from __future__ import annotations

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.templates.source import Launch, make_launch, split, substitute
from torch_backplane.kernels.templates.spelling import lane_count

_SMALL_GROUP = 8
_OUTER_ROWS = 8
_INNER_ROWS = _INNER_COLUMNS = 4
# A group of SIDE × SIDE work items computes SIDE × SIDE × _PER_ITEM × _PER_ITEM results.
_PER_ITEM, _DEPTH, _SIDES = 4, 16, (16, 8, 4)
_BLOCK = 64  # additions in a row, for each number of a vector


def matmul(
    dialect: Dialect,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    alpha: int | float = 1,
    beta: int | float = 1,
) -> Launch:
    """out = beta * c + alpha * a @ b; without c, out = alpha * a @ b.

    Args:
        out, c: (batch, rows, columns), with none, one or two dimensions of batch. c has out's shape (expanded), and may
            be out.
        a: (batch, rows, depth). b: (batch, depth, columns). A stride may be anything, 0 too.

    Sums are in float32 for float16 and bfloat16; integers wrap.
    """
    while out.dim() < 4:
        out, a, b = out.unsqueeze(0), a.unsqueeze(0), b.unsqueeze(0)
        c = None if c is None else c.unsqueeze(0)
    outer, inner, rows, columns = out.shape
    batch, depth = outer * inner, a.shape[3]
    if c is None and out.stride(3) != 1 and out.stride(2) == 1:
        return matmul(dialect, out.mT, b.mT, a.mT, None, alpha)
    inputs = {"a": a, "b": b}
    if c is not None:
        inputs["c"] = c
    integers = {"batches": batch, "inner_batches": inner, "rows": rows, "columns": columns, "depth": depth}
    for name, tensor in {"out": out, **inputs}.items():
        steps = (f"{name}_outer", f"{name}_inner", f"{name}_row", f"{name}_column")
        integers |= dict(zip(steps, tensor.stride(), strict=True))
    is_float = facts(out.dtype).category == "float"
    value = value_dtype(out.dtype) if is_float else torch.uint64 if facts(out.dtype).bits == 64 else torch.uint32
    number = value if is_float else torch.int64
    constants: dict[str, int | str] = {
        "MULTIPLY_ADD(x, y, z)": "fma(x, y, z)" if is_float else "((x) * (y) + (z))",
        "WITH_C(at)": "(value_t)alpha * " if c is None else "(value_t)beta * (value_t)load_c(at) + (value_t)alpha * ",
    }
    lanes = lane_count(dialect, value)
    side = _side(dialect, value)
    if side is not None:
        form, group, tile = "tiled", side * side, side * _PER_ITEM
        groups = batch * -(-rows // tile) * -(-columns // tile)
        body = _tiled(side)
    else:
        form, group = "outer", dialect.target.small_group(_SMALL_GROUP)
        tile_rows, tile_columns = _OUTER_ROWS, lanes
        if a.stride(3) == 1 and b.stride(2) == 1 and depth >= 2 * lanes:
            form, tile_rows, tile_columns = "inner", _INNER_ROWS, _INNER_COLUMNS
        row_contiguous = b.stride(3) == 1
        form += "" if form == "inner" or row_contiguous else "_strided"
        groups = -(-(batch * -(-rows // tile_rows) * -(-columns // tile_columns)) // group)
        body = _inner(group) if form == "inner" else _outer(group, row_contiguous)
    return make_launch(
        f"matmul_{form}",
        dialect,
        outputs={"out": out},
        inputs=inputs,
        integers=integers,
        numbers={"alpha": (number, alpha), **({} if c is None else {"beta": (number, beta)})},
        constants=constants,
        value=value,
        body=body,
        groups=groups,
        group_size=group,
        bounded=form != "tiled",
        strided={"out", *inputs},
    )


def _side(dialect: Dialect, value: torch.dtype) -> int | None:
    """The largest side of a group that the target can have, and has local memory for, for tiles of a and of b. None
    where there is no such group, or work items are no lanes that tiles would help.
    """

    def fits(side: int) -> bool:
        tiles = 2 * _DEPTH * (side * _PER_ITEM + 1) * value.itemsize
        return side * side <= dialect.target.max_group_size and tiles <= dialect.target.local_memory

    return next(filter(fits, _SIDES), None) if dialect.target.simt else None


def _block(group: int, tile_rows: int, tile_columns: str) -> str:
    """Statements that find the work item's block: its `batch`, and its first row and column i and j."""
    return f"""
  const index_t item = (index_t)GROUP * {group} + ITEM;
  const index_t row_blocks = (rows + {tile_rows - 1}) / {tile_rows};
  const index_t column_blocks = (columns + {tile_columns} - 1) / {tile_columns};
  if (item >= batches * row_blocks * column_blocks) return;
  {split("item", ["batches", "column_blocks", "row_blocks"], ["batch", "column_block", "row_block"])}
  const index_t i = row_block * {tile_rows}, j = column_block * {tile_columns};"""


def _batch(tensor: str) -> str:
    """Where the matrix of this batch begins."""
    return f"batch / inner_batches * {tensor}_outer + batch % inner_batches * {tensor}_inner"


def _store(i: str, j: str, value: str) -> str:
    return (
        f"if ({i} < rows && {j} < columns) store_out({_batch('out')} + ({i}) * out_row + ({j}) * out_column, "
        f"WITH_C({_batch('c')} + ({i}) * c_row + ({j}) * c_column) {value});"
    )


def _outer(group: int, row_contiguous: bool) -> str:
    rows = range(_OUTER_ROWS)

    def depth_loop(lanes: str) -> str:
        steps = "\n".join(
            f"      block{x} = MULTIPLY_ADD(LANES_OF((value_t)load_a(a_at{x} + k * a_column)), b_lanes, block{x});"
            for x in rows
        )
        return f"""for (index_t k = 0; k < depth;) {{
    const index_t end = min(k + {_BLOCK}, depth);
    {" ".join(f"value_t_lanes block{x} = LANES_OF(0);" for x in rows)}
    for (; k < end; ++k) {{
      {lanes}
{steps}
    }}
    {" ".join(f"ADD_lanes(sum{x}, block{x})" for x in rows)}
  }}"""

    gathered = """value_t gathered[LANES];
    for (int lane = 0; lane < LANES; ++lane) gathered[lane] =
      load_b(b_at + k * b_row + min(j + lane, columns - 1) * b_column);
    const value_t_lanes b_lanes = lanes_put(gathered);"""
    loops = depth_loop(gathered)
    if row_contiguous:
        contiguous = depth_loop("const value_t_lanes b_lanes = load_b_lanes(b_at + k * b_row + j);")
        loops = f"if (j + LANES <= columns) {contiguous} else {loops}"
    stores = " ".join(
        f"lanes_get(TOTAL(sum{x}), found); for (int y = 0; y < LANES; ++y) {_store(f'i + {x}', 'j + y', 'found[y]')}"
        for x in rows
    )
    return f"""{_block(group, _OUTER_ROWS, "LANES")}
  const index_t a_batch = {_batch("a")}, b_at = {_batch("b")};
  {" ".join(f"const index_t a_at{x} = a_batch + min(i + {x}, rows - 1) * a_row;" for x in rows)}
  {" ".join(f"value_t_lanes sum{x} = LANES_OF(0), sum{x}_lost = LANES_OF(0);" for x in rows)}
  {loops}
  value_t found[LANES];
  {stores}
"""


def _inner(group: int) -> str:
    rows, columns = range(_INNER_ROWS), range(_INNER_COLUMNS)
    pairs = [(x, y) for x in rows for y in columns]
    steps = "\n".join(
        f"      {{ const value_t_lanes a_lanes = load_a_lanes(a_at{x} + k);"
        + "".join(f" block{x}_{y} = MULTIPLY_ADD(a_lanes, b_lanes{y}, block{x}_{y});" for y in columns)
        + " }"
        for x in rows
    )
    last = " ".join(
        f"total{x}_{y} = MULTIPLY_ADD((value_t)load_a(a_at{x} + k), (value_t)load_b(b_at{y} + k), total{x}_{y});"
        for x, y in pairs
    )
    return f"""{_block(group, _INNER_ROWS, str(_INNER_COLUMNS))}
  const index_t a_batch = {_batch("a")}, b_batch = {_batch("b")};
  {" ".join(f"const index_t a_at{x} = a_batch + min(i + {x}, rows - 1) * a_row;" for x in rows)}
  {" ".join(f"const index_t b_at{y} = b_batch + min(j + {y}, columns - 1) * b_column;" for y in columns)}
  {" ".join(f"SUM(sum{x}_{y}); SUM_lanes(sum{x}_{y});" for x, y in pairs)}
  index_t k = 0;
  while (k + LANES <= depth) {{
    const index_t end = min(k + {_BLOCK} * LANES, depth);
    {" ".join(f"value_t_lanes block{x}_{y} = LANES_OF(0);" for x, y in pairs)}
    for (; k + LANES <= end; k += LANES) {{
      {" ".join(f"const value_t_lanes b_lanes{y} = load_b_lanes(b_at{y} + k);" for y in columns)}
{steps}
    }}
    {" ".join(f"ADD_lanes(sum{x}_{y}_lanes, block{x}_{y})" for x, y in pairs)}
  }}
  {" ".join(f"MEET(sum{x}_{y}); value_t total{x}_{y} = TOTAL(sum{x}_{y});" for x, y in pairs)}
  for (; k < depth; ++k) {{ {last} }}
  {" ".join(_store(f"i + {x}", f"j + {y}", f"total{x}_{y}") for x, y in pairs)}
"""


def _tiled(side: int) -> str:
    parts = {
        "tile": str(side * _PER_ITEM),
        "depth": str(_DEPTH),
        "block": str(_BLOCK),
        "group": str(side * side),
        "side": str(side),
        "per_item": str(_PER_ITEM),
        "split": split("tile", ["batches", "row_tiles", "column_tiles"], ["batch", "row_tile", "column_tile"]),
        "a_batch": _batch("a"),
        "b_batch": _batch("b"),
        "store": _store("i", "j", "(lost[x][y] == lost[x][y] ? sum[x][y] + lost[x][y] : sum[x][y])"),
    }
    return substitute(_TILED, parts)


# Tiles are filled along the dimension that is contiguous in memory, so that work items read neighbours.
_TILED = """
  LOCAL value_t a_tile[$depth][$tile + 1];
  LOCAL value_t b_tile[$depth][$tile + 1];
  const index_t tile = GROUP;
  const index_t row_tiles = (rows + $tile - 1) / $tile, column_tiles = (columns + $tile - 1) / $tile;
  $split
  const int item_row = ITEM / $side, item_column = ITEM % $side;
  const bool a_along_depth = a_column == 1, b_along_depth = b_column != 1;
  const index_t a_batch = $a_batch, b_batch = $b_batch;
  value_t sum[$per_item][$per_item], lost[$per_item][$per_item], block[$per_item][$per_item];
  for (int x = 0; x < $per_item; ++x)
    for (int y = 0; y < $per_item; ++y) sum[x][y] = lost[x][y] = block[x][y] = 0;
  for (index_t first = 0; first < depth; first += $depth) {
    for (int e = ITEM; e < $depth * $tile; e += $group) {
      const int a_k = a_along_depth ? e % $depth : e / $tile, a_i = a_along_depth ? e / $depth : e % $tile;
      const index_t i = row_tile * $tile + a_i;
      a_tile[a_k][a_i] = i < rows && first + a_k < depth
        ? (value_t)load_a(a_batch + i * a_row + (first + a_k) * a_column) : (value_t)0;
      const int b_k = b_along_depth ? e % $depth : e / $tile, b_j = b_along_depth ? e / $depth : e % $tile;
      const index_t j = column_tile * $tile + b_j;
      b_tile[b_k][b_j] = j < columns && first + b_k < depth
        ? (value_t)load_b(b_batch + (first + b_k) * b_row + j * b_column) : (value_t)0;
    }
    BARRIER;
    for (int k = 0; k < $depth; ++k) {
      value_t a_column_part[$per_item], b_row_part[$per_item];
      for (int x = 0; x < $per_item; ++x) a_column_part[x] = a_tile[k][item_row + x * $side];
      for (int y = 0; y < $per_item; ++y) b_row_part[y] = b_tile[k][item_column + y * $side];
      for (int x = 0; x < $per_item; ++x)
        for (int y = 0; y < $per_item; ++y) block[x][y] = MULTIPLY_ADD(a_column_part[x], b_row_part[y], block[x][y]);
    }
    BARRIER;
    if ((first + $depth) % $block == 0 || first + $depth >= depth)
      for (int x = 0; x < $per_item; ++x)
        for (int y = 0; y < $per_item; ++y) {
          ADD_AS(value_t, sum[x][y], lost[x][y], block[x][y])
          block[x][y] = 0;
        }
  }
  for (int x = 0; x < $per_item; ++x)
    for (int y = 0; y < $per_item; ++y) {
      const index_t i = row_tile * $tile + item_row + x * $side, j = column_tile * $tile + item_column + y * $side;
      $store
    }
"""
