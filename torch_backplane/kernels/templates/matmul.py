"""Batched matrix products of operands with any strides: out = beta * c + alpha * a @ b.

There are four forms:

- `tiled`: on SIMT targets with enough local memory. Long sums of few results are split among work groups (`tiles.py`).
- `packed`: on CPUs, if there are enough rows and columns (`cpu/packed_product.py`).
- `inner`: otherwise, if both operands are contiguous along the summed dimension. A work item computes a block of
  results in registers, with vectors along that dimension.
- `outer`: otherwise. Like `inner`, with vectors along the rows of b. It works for any strides of a.

All forms add up the products of a block of the depth first, and then the blocks with error compensation, because the
rounding error of a sum grows with its longest chain of additions. Short sums compensate each product and addition.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from torch_backplane.kernels.cpu import packed_product
from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.templates.fused_operations import Operations, joined, loaded_operand, stored_results
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, extent, split
from torch_backplane.kernels.templates.spelling import lane_count
from torch_backplane.kernels.templates.tiles import (
    BLOCK,
    SHORT,
    PartialSums,
    Tile,
    add_parts,
    batch_start,
    choose_tile,
    divide,
    factors,
    max_parts,
    possible_tiles,
    room,
    store_result,
    summed,
    tiled,
    with_c,
)

_SMALL_GROUP = 8
_OUTER_ROWS = 8
_INNER_ROWS = _INNER_COLUMNS = 4
_OTHER = {"a": "b", "b": "a"}
_WHOLE = "/whole"  # suffix of forms that do not split sums


class ProductParams(NamedTuple):
    """How sums are computed, and what becomes of the results.

    Args:
        form: one of `forms`; empty for the default form.
        workspace: maximum bytes for partial sums, if there is a limit.
        reduced: partial sums are rounded to out's dtype.
        divides: whether sums can be split.
        epilogue: what the kernel computes instead of storing the results.
        prologues: for operands "a" and "b", what the kernel computes instead of loading an element. The target must
            have a `tiled` form (`has_tiles`).
        aligned: those of "a" and "b" that begin at a multiple of 16 bytes.
    """

    form: str = ""
    workspace: int | None = None
    reduced: bool = False
    divides: bool = True
    epilogue: Operations | None = None
    prologues: Mapping[str, Operations] = MappingProxyType({})
    aligned: frozenset[str] = frozenset()


def matmul(
    dialect: Dialect,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    scales: tuple[int | float, int | float] = (1, 1),
    params: ProductParams = ProductParams(),  # noqa: B008, it cannot be changed
) -> list[Launch]:
    """Computes out = beta * c + alpha * a @ b; without c, out = alpha * a @ b.

    Sums of float16 and bfloat16 are in float32; integers wrap. Where matrix instructions multiply float16 or bfloat16,
    the elements that prologues compute are rounded to it. Operands can have any strides, including 0.

    Args:
        out: shape (batch, rows, columns), with zero, one or two batch dimensions. With an epilogue, only its sizes
            and its dtype count.
        a: shape (batch, rows, depth). With a prologue, only its sizes and strides count.
        b: shape (batch, depth, columns). Likewise.
        c: has out's shape (expanded if necessary); can be out itself.
        scales: alpha and beta.
    """
    (alpha, beta), (form, workspace, reduced, divides, epilogue, prologues, aligned) = scales, params
    while out.dim() < 4:
        out, a, b = out.unsqueeze(0), a.unsqueeze(0), b.unsqueeze(0)
        c = None if c is None else c.unsqueeze(0)
    if epilogue is None and c is None and out.stride(3) != 1 and out.stride(2) == 1:
        out, a, b = out.mT, b.mT, a.mT
        prologues = {_OTHER[name]: one for name, one in prologues.items()}
        aligned = frozenset(_OTHER[name] for name in aligned)
    outer, inner, rows, columns = out.shape
    batch, depth = outer * inner, a.shape[3]
    factors_of = {"a": a, "b": b}
    integers = {"batches": batch, "inner_batches": inner, "rows": rows, "columns": columns, "depth": depth}
    kind = summed(out.dtype)
    tile = _tile(dialect, out, factors_of, prologues, form)
    element = None if tile is None else tile.element
    loaded = joined(
        loaded_operand(dialect, name, one, prologues.get(name), element) for name, one in factors_of.items()
    )
    constants: dict[str, int | str] = {"MULTIPLY_ADD(x, y, z)": kind.multiply_add, "WITH_C(at)": with_c(c)}
    places = [extent(factors_of[name]) for name in prologues]
    spec = partial(LaunchSpec, dialect=dialect, constants=constants, value=kind.value, reached=places)
    lanes = lane_count(dialect, kind.value)
    short, functions = depth < SHORT and kind.value == out.dtype, ""
    if tile is not None:
        text = _tile_parts() if element is None else _matrix_parts(factors_of, aligned - prologues.keys())
        in_parts = summed(out.dtype, reduced, element is not None)
        most = max_parts(in_parts, out.numel(), workspace) if divides and not form.endswith(_WHOLE) else 1
        tiles = divide(dialect.target, tile, batch, rows, columns, depth, most)
        loaded = loaded._replace(functions=tile.functions + loaded.functions, types={**loaded.types, **tile.types})
        if tiles.parts > 1:
            parts = room(in_parts, tiles.parts, out.numel(), out.device)
            first = spec(
                "matmul_parts" + _suffix(None, prologues),
                outputs=parts,
                inputs=loaded.inputs,
                integers={**integers, **tiles.integers(), **_strides(factors_of)},
                numbers=loaded.numbers,
                types=loaded.types,
                functions=loaded.functions,
                body=tiled(tiles, {**text, "lost": ""} if in_parts.loses else text),
                groups=tiles.groups,
                group_size=tile.items,
                strided={*loaded.inputs},
            ).launch()
            if epilogue is not None:  # its places are those of a contiguous tensor
                out = torch.empty(out.shape, dtype=out.dtype, device="meta")
            return [first, *add_parts(dialect, "matmul", out, PartialSums(in_parts, parts), c, scales, epilogue)]
        form, group, groups = "tiled" if element is None else "by_matrices", tile.items, tiles.groups
        body = tiled(tiles, {**text, "short": ""} if short else text)
        functions = loaded.functions
    elif prologues:
        raise ValueError("the target has no tiled form of products, so operands cannot have prologues")
    elif not short and packed_product.suits(dialect, out, a, b):
        form, group = "packed", 1
        in_rows = (epilogue is not None or out.stride(3) == 1) and (c is None or c.stride(3) == 1)
        packed = packed_product.packed(dialect, out, b, in_rows, c is not None)
        groups, functions, body = packed.groups, packed.functions, packed.body
    else:
        form, group = "outer", dialect.target.small_group(_SMALL_GROUP)
        tile_rows, tile_columns = _OUTER_ROWS, lanes
        if a.stride(3) == 1 and b.stride(2) == 1 and depth >= max(2 * lanes, SHORT):
            form, tile_rows, tile_columns = "inner", _INNER_ROWS, _INNER_COLUMNS
        row_contiguous = b.stride(3) == 1
        form += "" if form == "inner" or row_contiguous else "_strided"
        groups = -(-(batch * -(-rows // tile_rows) * -(-columns // tile_columns)) // group)
        body = _inner(group) if form == "inner" else _outer(group, row_contiguous, short)
    added = {} if c is None else {"c": c}
    loaded = loaded._replace(functions=functions, inputs={**loaded.inputs, **added})
    made = joined([loaded, stored_results(dialect, out, epilogue)])
    return [
        spec(
            f"matmul_{form}{'_short' if short else ''}{_suffix(epilogue, prologues)}",
            outputs=made.outputs,
            inputs=made.inputs,
            integers={**integers, **_strides({**({"out": out} if epilogue is None else {}), **factors_of, **added})},
            numbers={**factors(kind, c, alpha, beta), **made.numbers},
            types=made.types,
            functions=made.functions,
            body=body,
            groups=groups,
            group_size=group,
            bounded=tile is None,
            strided={*made.outputs, *made.inputs},
        ).launch()
    ]


def _suffix(epilogue: Operations | None, prologues: Mapping[str, Operations]) -> str:
    return ("_prologue" if prologues else "") + ("" if epilogue is None else "_epilogue")


def has_tiles(dialect: Dialect, dtype: torch.dtype) -> bool:
    """Whether results of `dtype` are computed by the `tiled` form."""
    return bool(possible_tiles(dialect, summed(dtype).value, dtype))


def forms(dialect: Dialect, dtype: torch.dtype) -> list[str]:
    """Returns the alternatives to the default form for operands and results of `dtype`: other tiles, sums not split."""
    possible = possible_tiles(dialect, summed(dtype).value, dtype)
    tiles = [f"tile={one.side}" for one in possible]
    is_chosen_by_sizes = any(one.element is not None for one in possible)
    return [*(tiles if is_chosen_by_sizes else tiles[1:]), *(tile + _WHOLE for tile in tiles)]


def _tile(
    dialect: Dialect,
    out: torch.Tensor,
    factors_of: Mapping[str, torch.Tensor],
    prologues: Mapping[str, Operations],
    form: str,
) -> Tile | None:
    """Returns the tile of a work group; None if the form is not `tiled`."""
    same = all(one.dtype == out.dtype for name, one in factors_of.items() if name not in prologues)
    possible = possible_tiles(dialect, summed(out.dtype).value, out.dtype if same else None)
    if side := form.removesuffix(_WHOLE).removeprefix("tile="):
        return {str(one.side): one for one in possible}[side]
    batch, (rows, columns) = out.shape[0] * out.shape[1], out.shape[2:]
    return choose_tile(dialect.target, possible, batch, rows, columns) if possible else None


def _strides(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    integers: dict[str, int] = {}
    for name, tensor in tensors.items():
        steps = (f"{name}_outer", f"{name}_inner", f"{name}_row", f"{name}_column")
        integers |= dict(zip(steps, tensor.stride(), strict=True))
    return integers


def _block(group: int, tile_rows: int, tile_columns: str) -> str:
    """Returns statements that declare the work item's block: its `batch` and its first row i and column j."""
    return f"""
  const index_t item = (index_t)GROUP * {group} + ITEM;
  const index_t row_blocks = (rows + {tile_rows - 1}) / {tile_rows};
  const index_t column_blocks = (columns + {tile_columns} - 1) / {tile_columns};
  if (item >= batches * row_blocks * column_blocks) return;
  {split("item", ["batches", "column_blocks", "row_blocks"], ["batch", "column_block", "row_block"])}
  const index_t i = row_block * {tile_rows}, j = column_block * {tile_columns};"""


def _outer(group: int, row_contiguous: bool, short: bool) -> str:
    rows = range(_OUTER_ROWS)

    def depth_loop(lanes: str) -> str:
        factor = "const value_t_lanes a_lanes = LANES_OF((value_t)load_a(a_at{x} + k * a_column));"
        add = "block{x} = MULTIPLY_ADD(a_lanes, b_lanes, block{x});"
        if short:
            add = "ADD_PRODUCT(value_t_lanes, sum{x}, sum{x}_lost, a_lanes, b_lanes)"
        steps = "\n".join(f"      {{ {factor} {add} }}".replace("{x}", str(x)) for x in rows)
        return f"""for (index_t k = 0; k < depth;) {{
    const index_t end = min(k + {BLOCK}, depth);
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
        f"lanes_get(TOTAL(sum{x}), found); "
        f"for (int y = 0; y < LANES; ++y) {store_result(f'i + {x}', 'j + y', 'found[y]')}"
        for x in rows
    )
    return f"""{_block(group, _OUTER_ROWS, "LANES")}
  const index_t a_batch = {batch_start("a")}, b_at = {batch_start("b")};
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
  const index_t a_batch = {batch_start("a")}, b_batch = {batch_start("b")};
  {" ".join(f"const index_t a_at{x} = a_batch + min(i + {x}, rows - 1) * a_row;" for x in rows)}
  {" ".join(f"const index_t b_at{y} = b_batch + min(j + {y}, columns - 1) * b_column;" for y in columns)}
  {" ".join(f"SUM(sum{x}_{y}); SUM_lanes(sum{x}_{y});" for x, y in pairs)}
  index_t k = 0;
  while (k + LANES <= depth) {{
    const index_t end = min(k + {BLOCK} * LANES, depth);
    {" ".join(f"value_t_lanes block{x}_{y} = LANES_OF(0);" for x, y in pairs)}
    for (; k + LANES <= end; k += LANES) {{
      {" ".join(f"const value_t_lanes b_lanes{y} = load_b_lanes(b_at{y} + k);" for y in columns)}
{steps}
    }}
    {" ".join(f"ADD_lanes(sum{x}_{y}_lanes, block{x}_{y})" for x, y in pairs)}
  }}
  {" ".join(f"MEET(sum{x}_{y}); value_t total{x}_{y} = TOTAL(sum{x}_{y});" for x, y in pairs)}
  for (; k < depth; ++k) {{ {last} }}
  {" ".join(store_result(f"i + {x}", f"j + {y}", f"total{x}_{y}") for x, y in pairs)}
"""


# The offsets of the elements that `tiled` asks for.
_AT = {
    "a": "a_batch + i * a_row + (first + a_k) * a_column",
    "b": "b_batch + (first + b_k) * b_row + j * b_column",
}


def _tile_parts() -> dict[str, str]:
    """Returns the parts for `tiled`."""
    # Tiles are filled along the contiguous dimension, so that consecutive work items read consecutive elements.
    return {
        "a_along_depth": "a_column == 1",
        "b_along_depth": "b_column != 1",
        "shared": "",
        "prepare": f"const index_t a_batch = {batch_start('a')}, b_batch = {batch_start('b')};",
        **{name: f"LOAD_{name}({at}, {name}_element)" for name, at in _AT.items()},
        "next": "",
        "store": store_result("i", "j", "VALUE"),
    }


def _matrix_parts(factors_of: Mapping[str, torch.Tensor], aligned: Collection[str]) -> dict[str, str]:
    """Returns the parts for `tiled` with matrix instructions: the text depends on the layout."""
    along_depth = {"a": factors_of["a"].stride(3) == 1, "b": factors_of["b"].stride(3) != 1}
    along = {"a": 3 if along_depth["a"] else 2, "b": 2 if along_depth["b"] else 3}
    return {
        **_tile_parts(),
        **{f"{name}_along_depth": "true" if is_along else "false" for name, is_along in along_depth.items()},
        **{f"{name}_line": _AT[name] for name in aligned if _has_lines(factors_of[name], along[name])},
    }


def _has_lines(operand: torch.Tensor, along: int) -> bool:
    """Whether 8 elements from a multiple of 8 on along a dimension are together in memory, and all in the operand, at a
    multiple of 16 bytes from its first element."""
    steps = [operand.stride(d) for d in range(4) if d != along and operand.shape[d] != 1]
    return operand.stride(along) == 1 and operand.shape[along] % 8 == 0 and all(step % 8 == 0 for step in steps)
