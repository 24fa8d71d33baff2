"""Attention with modified scores, and with a block mask, in one pass over the blocks of keys that the mask has.

The kernel is that of `attention.py`. It runs statements for each score (`score_mod` of flex_attention), and in partial
blocks others that decide whether a query attends to a key (`mask_mod`). A work group reads only the blocks of keys that
the block mask lists for its queries, so blocks that are not listed cost no time.

A work group's tile of queries is within one block of the mask. If there are too few tiles to fill the device, several
work groups share one, and take turns with the tiles of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.target import LimitExceeded
from torch_backplane.kernels.templates import errors
from torch_backplane.kernels.templates.attention import (
    BEFORE,
    BODY,
    NORMALIZE,
    TYPES,
    WEIGH,
    constants_of,
    divided,
    merged,
    product,
    side_of,
    strides_of,
    tiles_of,
)
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, split, substitute

# Logarithms to base 2, as flex_attention's operator returns them.
_BASE_2 = " * (value_t)1.4426950408889634"
_MOST_INTEGERS = 54  # upper bound: 25 strides of 8 tensors, and sizes; without those of the statements


class BlockMask(NamedTuple):
    """The blocks of keys that the queries of a block attend to, as in `torch.nn.attention.flex_attention.BlockMask`.

    Args:
        counts: int32, shape (batch, heads, blocks of queries): the number of partial blocks, to which `Scores.mask`
            applies. Strides can be 0, here and below.
        indices: int32, shape (batch, heads, blocks of queries, blocks of keys). The first `counts` are the numbers of
            the partial blocks.
        full_counts, full_indices: the same for blocks in which queries attend to all keys. None if there are none.
        queries, keys: the numbers of queries and of keys of a block.
    """

    counts: torch.Tensor
    indices: torch.Tensor
    full_counts: torch.Tensor | None
    full_indices: torch.Tensor | None
    queries: int
    keys: int


class Scores(NamedTuple):
    """Statements for each score.

    They use `score`, its value in value_t; `in_batch`, `in_head`, `query_at` and `key_at`, its place, as int; and the
    names of `inputs` and `numbers`.

    Args:
        modify: statements that assign the modified score to `score`.
        mask: statements that assign to the bool `attends` whether the query attends to the key.
        functions: text before the kernel.
        dtypes: dtypes of variables in the statements.
        inputs: tensors by their names in the statements, which handle the strides.
        numbers: other arguments by name, each with its dtype.
        report: where statements report an index out of range with `checked_index` and `or_first`. None if they do not.
    """

    modify: str
    mask: str
    functions: str
    dtypes: tuple[torch.dtype, ...]
    inputs: Mapping[str, torch.Tensor]
    numbers: Mapping[str, tuple[torch.dtype, Any]]
    report: errors.Report | None


class Operands(NamedTuple):
    """The operands of `flex_attention`.

    Args:
        query: shape (batch, heads, queries, depth).
        key: shape (batch, fewer, keys, depth). `fewer` divides `heads`: consecutive query heads share a head of key and
            value.
        value: shape (batch, fewer, keys, columns).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Results(NamedTuple):
    """The outputs of `flex_attention`.

    Args:
        out: shape (batch, heads, queries, columns).
        logarithm: shape (batch, heads, queries), contiguous: the logarithm to base 2 of the sum of the exponentials of
            the scores; -inf for queries that attend to no key.
        maximum: shape (batch, heads, queries), contiguous: the greatest score, divided by log(2). None if not wanted.
    """

    out: torch.Tensor
    logarithm: torch.Tensor
    maximum: torch.Tensor | None


def argument_bytes(dialect: Dialect, inputs: int, numbers: int) -> int:
    """Returns an upper bound for the bytes of a kernel's arguments, with these numbers of inputs of the statements."""
    return (11 + inputs) * dialect.buffer_bytes + (_MOST_INTEGERS + numbers) * 8


def flex_attention(
    dialect: Dialect, results: Results, given: Operands, blocks: BlockMask, scores: Scores, scale: float
) -> list[Launch]:
    """Computes softmax(modify(scale * query @ key.mT)) @ value; 0 in rows of queries that attend to no key.

    Args:
        results: the outputs.
        given: the operands.
        blocks: the block mask.
        scores: the statements for each score.
        scale: factor of query @ key.mT.

    Raises:
        LimitExceeded: the target does not support this (see `attention.attends_in_one_pass`).
    """
    (out, logarithm, maximum), (query, key, value) = results, given
    operands = {"own": query, "other": key, "added": value}
    batch, heads, rows, columns = out.shape
    compute = value_dtype(out.dtype)
    side = side_of(dialect.target, compute.itemsize, min(rows, blocks.queries))
    if side is None:
        raise LimitExceeded("attention in one pass does not fit into Target.local_memory or Target.max_group_size")
    queries, keys = min(blocks.queries, rows), min(blocks.keys, key.shape[2])
    tile, column_blocks, tiles_each, column_parts = tiles_of(side, queries, columns)
    row_tiles = -(-rows // queries) * tiles_each
    groups = batch * heads * row_tiles * column_parts
    parts = divided(dialect.target, groups, side, key.shape[2])[0] if dialect.target.simt else 1
    values, logarithms, maxima = results
    if parts > 1:
        values, logarithms = (
            torch.empty([parts, *one.shape], dtype=compute, device=out.device) for one in (out, logarithm)
        )
        maxima = None if maximum is None else torch.empty_like(logarithms)
    counts = {"counts": blocks.counts, "full_counts": blocks.full_counts}
    indices = {"indices": blocks.indices, "full_indices": blocks.full_indices}
    listed = {name: one for name, one in {**counts, **indices}.items() if one is not None}
    strided = {"out": values if parts == 1 else values[0], **operands, **listed}
    outputs = {"out": values, "logarithm": logarithms, **({} if maxima is None else {"maximum": maxima})}
    reported: dict[str, torch.Tensor] = {}
    numbers = {"scale": (compute, scale), **scores.numbers}
    if scores.report is not None:
        reported["errors"] = scores.report.words
        numbers["error_operator"] = (torch.int32, errors.operator_number(scores.report.operator))
    first = LaunchSpec(
        "flex_attention" if parts == 1 else "flex_attention_parts",
        dialect,
        outputs={**outputs, **reported},
        inputs={**operands, **listed, **scores.inputs},
        integers={
            "batches": batch,
            "heads": heads,
            "sharing": heads // key.shape[1],
            "rows": rows,
            "others": key.shape[2],
            "columns": columns,
            "depth": query.shape[3],
            "parts": parts,
            "row_tiles": row_tiles,
            "column_parts": column_parts,
            "block_queries": queries,
            "block_keys": keys,
            "block_tiles": tiles_each,
            "block_steps": -(-keys // tile),
            **strides_of(strided),
        },
        numbers=numbers,
        types=TYPES | {f"type_{str(one).removeprefix('torch.')}": one for one in scores.dtypes},
        functions=(_CHECKS if reported else "") + scores.functions,
        constants={
            **constants_of(dialect, compute, side),
            "SHARERS": side * side // tile,
            "BLOCKS": column_blocks,
            "WRAPS": 0,
        },
        value=compute,
        body=_body(blocks, scores, maximum is not None, parts > 1),
        groups=parts * groups,
        group_size=side * side,
        strided={*strided, *scores.inputs},
    ).launch()
    if parts == 1:
        return [first]
    found = None if maximum is None or maxima is None else (maximum, maxima)
    return [first, merged(dialect, out, logarithm, values, logarithms, found, _BASE_2)]


def _body(blocks: BlockMask, scores: Scores, finds_maxima: bool, divides: bool) -> str:
    unit, has_full = "" if divides else _BASE_2, blocks.full_counts is not None
    head = "batch * {0}_batch + head * {0}_head + query_block * {0}_row"
    return substitute(
        BODY,
        {
            "before": BEFORE,
            "shift": _COUNT,
            "place": split(
                "place",
                ["parts", "batches", "heads", "row_tiles", "column_parts"],
                ["part", "batch", "head", "row_tile", "column_part"],
            ),
            "out_part": "part * batches * heads * rows * columns" if divides else "0",
            "part_rows": "part * batches * heads * rows" if divides else "0",
            "query_heads": "heads",
            "queries": "rows",
            "sharers": "1",
            "query_head": "head",
            "head_of_others": "head / sharing",
            "first_own": "row_tile / block_tiles * block_queries + row_tile % block_tiles * TILE",
            "own_end": "own_end",
            "other_end": "other_end",
            "tiles": "for (index_t step = part; step < steps; step += parts)",
            "counts": head.format("counts"),
            "full_counts": f"(index_t)load_full_counts({head.format('full_counts')})" if has_full else "0",
            "draw": _BLOCK,
            "indices": f"(index_t)load_indices({head.format('indices')} + listed * indices_column)",
            "full_indices": f"is_full ? (index_t)load_full_indices({head.format('full_indices')}"
            " + (listed - partial) * full_indices_column) : "
            if has_full
            else "",
            "scores": product("own", "other", "scores", "depth", ("own_end", "other_end")),
            "slopes": "",
            "weighted": _WEIGHTED,
            "mask": scores.mask,
            "modify": scores.modify,
            "unseen": "NOTHING",
            "weigh": WEIGH,
            "kept_power": "power",
            "drop": "",
            "raised": "",
            "from_added": "batch * added_batch + head_of_others * added_head",
            "added": "(value_t)load_added(from_added + other_at * added_row + column * added_column)",
            "finish": NORMALIZE,
            "unit": unit,
            "maximum": f"store_maximum(row_at, greatest[row]{unit});" if finds_maxima else "",
        },
    )


_CHECKS = f"""\
{errors.FUNCTIONS}
FUNCTION index_t or_first(const index_t checked) {{ return checked < 0 ? 0 : checked; }}
"""

# The tiles of keys of all blocks that are listed for the tile's block of queries, partial blocks first.
_COUNT = """
  const index_t query_block = row_tile / block_tiles, own_end = min(rows, (query_block + 1) * block_queries);
  const index_t partial = (index_t)load_counts($counts);
  const index_t steps = (partial + $full_counts) * block_steps;
"""

_BLOCK = """
      const index_t listed = step / block_steps;
      const bool is_full = listed >= partial;
      const index_t key_block = $full_indices$indices;
      const index_t first = key_block * block_keys + step % block_steps * TILE;
      const index_t other_end = min(others, (key_block + 1) * block_keys);
"""

_WEIGHTED = """
          if (own_at < own_end && other_at < other_end) {
            const int in_batch = (int)batch, in_head = (int)head, query_at = (int)own_at, key_at = (int)other_at;
            bool attends = true;
            if (!is_full) { $mask }
            if (attends) {
              value_t score = scores[x][y] * scale;
              { $modify }
              weight = score;
            }
          }
"""
