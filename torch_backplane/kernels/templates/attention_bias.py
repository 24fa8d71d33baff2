"""The gradient of attention's bias, such as a float mask, without memory for anything but the gradient.

A work group has a tile of the gradient. If the bias was broadcast over batches, heads, queries or keys, the work group
iterates over the tiles of scores that the bias was added to, recomputes their gradients, and adds them up in a fixed
order. If a small bias has too few tiles to fill the device, several work groups share a tile, and their parts are added
up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.target import LimitExceeded
from torch_backplane.kernels.templates.attention import (
    TYPES,
    AttentionParams,
    Saved,
    constants_of,
    drawing,
    inputs_of,
    strides_of,
    words_of,
)
from torch_backplane.kernels.templates.attention_tiles import PER_ITEM, Tiles, side_of
from torch_backplane.kernels.templates.random import scalar_words
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, split, substitute


class _Steps(NamedTuple):
    """The division of the work.

    Args:
        side: side of a work group.
        tiles: number of tiles of the gradient, by dimension.
        each: number of tiles of scores for each of them, by dimension.
    """

    side: int
    tiles: tuple[int, int, int, int]
    each: tuple[int, int, int, int]


def _steps(dialect: Dialect, query: torch.Tensor, key: torch.Tensor, shape: Sequence[int]) -> _Steps:
    batch, heads, rows, _ = query.shape
    side = side_of(dialect.target, value_dtype(query.dtype).itemsize, rows)
    if side is None:
        raise LimitExceeded("attention in one pass does not fit into Target.local_memory or Target.max_group_size")
    tile = side * PER_ITEM
    scores = (batch, heads, -(-rows // tile), -(-key.shape[2] // tile))
    own = (shape[0], shape[1], -(-shape[2] // tile), -(-shape[3] // tile))
    each = [all_of // there for all_of, there in zip(scores, own, strict=True)]
    return _Steps(side, own, (each[0], each[1], each[2], each[3]))


def bias_gradient_parts(dialect: Dialect, query: torch.Tensor, key: torch.Tensor, shape: Sequence[int]) -> int:
    """Returns the number of parts that fill the device, for a gradient of the four-dimensional `shape`."""
    side, tiles, each = _steps(dialect, query, key, shape)
    target, groups, steps = dialect.target, math.prod(tiles), math.prod(each)
    if not target.should_divide(groups, steps * side * PER_ITEM):
        return 1
    return min(steps, -(-target.enough_groups_of(side * side) // groups))


def attention_bias_gradient(
    dialect: Dialect, out: torch.Tensor, grad: torch.Tensor, saved: Saved, params: AttentionParams
) -> Launch:
    """Computes the gradient of `attention`'s bias, in parts that the caller must add up.

    Args:
        out: shape (parts, batch, heads, queries, keys), contiguous. Each size after the first is that of the scores, or
            1 for the sum over the dimension.
        grad, saved, params: as in `attention_gradient`; `params.bias` is not None.
    """
    (query, key, value, logarithm, inner), (bias, _, scale, dropout, aligned) = saved, params
    assert bias is not None
    assert inner is not None
    compute = value_dtype(query.dtype)
    parts, *shape = out.shape
    side, tiles, each = _steps(dialect, query, key, shape)
    steps = math.prod(each)
    tensors = {"own": query, "other": key, "own_too": grad, "other_too": value}
    strided = {**tensors, "bias": bias}
    products = Tiles.of(dialect, side, tensors, aligned)
    integers = {
        "heads": query.shape[1],
        "sharing": query.shape[1] // key.shape[1],
        "rows": query.shape[2],
        "others": key.shape[2],
        "depth": query.shape[3],
        "depth_too": value.shape[3],
        **dict(zip(("out_batches", "out_heads", "out_rows", "out_columns"), shape, strict=True)),
        **dict(zip(("row_tiles", "column_tiles"), tiles[2:], strict=True)),
        **dict(zip(("batches_each", "heads_each", "rows_each", "columns_each"), each, strict=True)),
        "steps": steps,
        "part_steps": -(-steps // parts),
    }
    keeps_rows, keeps_columns = bool(shape[2] == query.shape[2]), bool(shape[3] == key.shape[2])
    return LaunchSpec(
        "attention_bias_gradient",
        dialect,
        outputs={"out": out},
        inputs=inputs_of(tensors, bias, {"logarithm": logarithm, "inner": inner}, dropout),
        integers={**integers, **strides_of(strided)},
        numbers={"scale": (compute, scale), **({} if dropout is None else {"kept": (compute, dropout.kept)})},
        types={**TYPES, **products.types},
        functions=products.functions + ("" if dropout is None else scalar_words(dialect, compute)),
        constants=constants_of(dialect, compute, products),
        value=compute,
        body=_body(products, params, keeps_rows, keeps_columns),
        groups=parts * math.prod(tiles),
        group_size=side * side,
        strided=set(strided),
    ).launch()


def _body(products: Tiles, params: AttentionParams, keeps_rows: bool, keeps_columns: bool) -> str:
    drops = params.dropout is not None
    words = words_of(False, True, params.causal, drops)
    finish = {(True, True): _STORE, (True, False): _OF_ROWS, (False, True): _OF_COLUMNS, (False, False): _OF_ALL}
    return substitute(
        _BODY,
        {
            "place": split(
                "place",
                ["parts", "out_batches", "out_heads", "row_tiles", "column_tiles"],
                ["part", "to_batch", "to_head", "to_row_tile", "to_column_tile"],
            ),
            "step": split(
                "at",
                ["batches_each", "heads_each", "rows_each", "columns_each"],
                ["further_batch", "further_head", "further_row_tile", "further_column_tile"],
            ),
            # No other barrier separates the last uses of the keep flags from the next draw.
            "wait": "BARRIER;" if drops else "",
            **drawing(drops),
            "declared": products.exchange + products.declared,
            "scores": products.product("own", "other", "scores", "depth"),
            "slopes": products.product("own_too", "other_too", "slopes", "depth_too"),
            "seen": words.seen,
            "score": words.score,
            "slope": words.slope,
            "met": "" if keeps_rows and keeps_columns else "LOCAL value_t met[TILE][SIDE + 1];",
            "finish": finish[keeps_rows, keeps_columns],
        },
    )


_BODY = """
  $declared
  $met
  const index_t place = GROUP;
  $place
  const index_t query_heads = heads, queries = rows;
  const index_t to_row = to_row_tile * TILE, to_column = to_column_tile * TILE;
  $drop
  value_t sum[PER_ITEM][PER_ITEM];
  for (int x = 0; x < PER_ITEM; ++x)
    for (int y = 0; y < PER_ITEM; ++y) sum[x][y] = 0;
  const index_t last = min(steps, part * part_steps + part_steps);
  for (index_t at = part * part_steps; at < last; ++at) {
    $step
    const index_t batch = to_batch + further_batch, head = to_head + further_head;
    const index_t query_head = head, head_of_others = head / sharing;
    const index_t first_own = to_row + further_row_tile * TILE;
    const index_t first = to_column + further_column_tile * TILE;
    $wait
    $draw
    $scores
    $slopes
    for (int x = 0; x < PER_ITEM; ++x)
      for (int y = 0; y < PER_ITEM; ++y) {
        const index_t own_at = first_own + item_row + x * SIDE, other_at = first + item_column + y * SIDE;
        if (own_at < rows && other_at < others$seen) {
          const value_t score = $score;
          sum[x][y] += $slope;
        }
      }
  }
  const index_t rows_before = ((part * out_batches + to_batch) * out_heads + to_head) * out_rows;
  $finish
"""

_STORE = """
  for (int x = 0; x < PER_ITEM; ++x)
    for (int y = 0; y < PER_ITEM; ++y) {
      const index_t row = to_row + item_row + x * SIDE, column = to_column + item_column + y * SIDE;
      if (row < out_rows && column < out_columns) store_out((rows_before + row) * out_columns + column, sum[x][y]);
    }
"""

# One dimension is kept: work items with the same position along it add up their sums in a row of `met`.
_OF_LINE = """
  for (int $kept = 0; $kept < PER_ITEM; ++$kept) {
    value_t total = 0;
    for (int $summed = 0; $summed < PER_ITEM; ++$summed) total += sum[x][y];
    met[$own + $kept * SIDE][$other] = total;
  }
  BARRIER;
  if (ITEM < TILE && $to + ITEM < $size) {
    value_t total = 0;
    for (int i = 0; i < SIDE; ++i) total += met[ITEM][i];
    store_out($before + $to + ITEM, total);
  }
"""
_OF_ROWS = substitute(
    _OF_LINE,
    {
        "kept": "x", "summed": "y", "own": "item_row", "other": "item_column", "to": "to_row", "size": "out_rows",
        "before": "rows_before",
    },
)  # fmt: skip
_OF_COLUMNS = substitute(
    _OF_LINE,
    {
        "kept": "y", "summed": "x", "own": "item_column", "other": "item_row", "to": "to_column", "size": "out_columns",
        "before": "rows_before * out_columns",
    },
)  # fmt: skip
_OF_ALL = """
  value_t total = 0;
  for (int x = 0; x < PER_ITEM; ++x)
    for (int y = 0; y < PER_ITEM; ++y) total += sum[x][y];
  met[item_row][item_column] = total;
  BARRIER;
  if (ITEM < SIDE) {
    total = 0;
    for (int i = 0; i < SIDE; ++i) total += met[ITEM][i];
    met[ITEM][SIDE] = total;
  }
  BARRIER;
  if (ITEM == 0) {
    total = 0;
    for (int i = 0; i < SIDE; ++i) total += met[i][SIDE];
    store_out(rows_before, total);
  }
"""
