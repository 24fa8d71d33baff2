"""Attention with modified scores, and with a block mask, in one pass over the blocks that the mask has; and gradients.

The kernels are those of `attention.py`. They run statements for each score (`score_mod` of flex_attention), and in
partial blocks others that decide whether a query attends to a key (`mask_mod`). A work group reads only the blocks of
keys that the block mask lists for its queries, so blocks that are not listed cost no time. For the gradients of keys
and values, it reads the blocks of queries that the mask lists for its keys.

A work group's tile is within one block of the mask. If there are too few tiles of queries to fill the device, several
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
    KEEP_SCORE,
    KEEP_WEIGHT,
    TYPES,
    WEIGH,
    Saved,
    constants_of,
    divided,
    heads_of,
    merged,
    normalize,
    strides_of,
    tiles_of,
)
from torch_backplane.kernels.templates.attention_tiles import WEIGHTS, Tiles, side_of
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, split, substitute

# Logarithms to base 2, as flex_attention's operator returns them.
_BASE_2, _FROM_BASE_2 = " * (value_t)1.4426950408889634", " * (value_t)0.6931471805599453"
# Upper bounds: 13 tensors; 38 strides of 10 tensors, and sizes. Without those of the statements.
_MOST_BUFFERS, _MOST_INTEGERS = 13, 56


class BlockMask(NamedTuple):
    """For each block of a work group's rows, its blocks of other rows, as in `torch.nn.attention.flex_attention`.

    The rows are queries, and the other rows keys; for the gradients of keys and values it is the other way around.

    Args:
        counts: int32, shape (batch, heads of queries, blocks of rows): the number of partial blocks, to which
            `Scores.mask` applies. Strides can be 0, here and below.
        indices: int32, shape (batch, heads of queries, blocks of rows, blocks of other rows). The first `counts` are
            the numbers of the partial blocks.
        full_counts, full_indices: the same for blocks in which queries attend to all keys. None if there are none.
        rows, others: the numbers of rows and of other rows of a block.
    """

    counts: torch.Tensor
    indices: torch.Tensor
    full_counts: torch.Tensor | None
    full_indices: torch.Tensor | None
    rows: int
    others: int


class Scores(NamedTuple):
    """Statements for each score.

    They use `score`, its value in value_t; `in_batch`, `in_head`, `query_at` and `key_at`, its place, as int; and the
    names of `inputs` and `numbers`.

    Args:
        scale: factor of query @ key.mT.
        modify: statements that assign the modified score to `score`.
        mask: statements that assign to the bool `attends` whether the query attends to the key.
        functions: text before the kernel.
        dtypes: dtypes of variables in the statements.
        inputs: tensors by their names in the statements, which handle the strides.
        numbers: other arguments by name, each with its dtype.
        report: where statements report an index out of range with `checked_index` and `or_first`. None if they do not.
        differentiate: for gradients: statements that use `score` before it is modified, and replace the gradient of the
            modified score in `slope` by that of `score`.
        aligned: query, key, value and the result's gradient begin at multiples of 16 bytes.
    """

    scale: float
    modify: str
    mask: str
    functions: str
    dtypes: tuple[torch.dtype, ...]
    inputs: Mapping[str, torch.Tensor]
    numbers: Mapping[str, tuple[torch.dtype, Any]]
    report: errors.Report | None
    differentiate: str = ""
    aligned: bool = False


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
    return (_MOST_BUFFERS + inputs) * dialect.buffer_bytes + (_MOST_INTEGERS + numbers) * 8


def flex_attention(
    dialect: Dialect, results: Results, given: Operands, blocks: BlockMask, scores: Scores
) -> list[Launch]:
    """Computes softmax(modify(scale * query @ key.mT)) @ value; 0 in rows of queries that attend to no key.

    Args:
        results: the outputs.
        given: the operands.
        blocks: the block mask: blocks of keys for blocks of queries.
        scores: the statements for each score.

    Raises:
        LimitExceeded: the target does not support this (see `attention.attends_in_one_pass`).
    """
    (out, logarithm, maximum), (query, key, value) = results, given
    operands = {"own": query, "other": key, "added": value}
    work = _work(dialect, out, blocks)
    parts = divided(dialect.target, work.groups, work.side, key.shape[2])[0] if dialect.target.simt else 1
    values, logarithms, maxima = results
    if parts > 1:
        compute = value_dtype(out.dtype)
        values, logarithms = (
            torch.empty([parts, *one.shape], dtype=compute, device=out.device) for one in (out, logarithm)
        )
        maxima = None if maximum is None else torch.empty_like(logarithms)
    outputs = {"out": values, "logarithm": logarithms, **({} if maxima is None else {"maximum": maxima})}
    unit = "" if parts > 1 else _BASE_2
    text = {
        **_sides(of_keys=False),
        "before": BEFORE,
        "slopes": "",
        "weight": "weight = score;",
        "unseen": "NOTHING",
        "keep": KEEP_SCORE,
        "weigh": WEIGH + "$scale",
        "kept_power": "power",
        "raised": "",
        "finish": "$normalize",
        "out_part": "part * batches * heads * rows * columns" if parts > 1 else "0",
        "part_rows": "part * batches * heads * rows" if parts > 1 else "0",
        "unit": unit,
        "maximum": f"store_maximum(row_at, greatest[row]{unit});" if maxima is not None else "",
    }
    name = "flex_attention" if parts == 1 else "flex_attention_parts"
    first = _launch(name, dialect, outputs, operands, blocks, scores, text)
    if parts == 1:
        return [first]
    found = None if maximum is None or maxima is None else (maximum, maxima)
    return [first, merged(dialect, out, logarithm, values, logarithms, found, _BASE_2)]


def flex_attention_gradient(
    dialect: Dialect, out: torch.Tensor, of: str, grad: torch.Tensor, saved: Saved, blocks: BlockMask, scores: Scores
) -> Launch:
    """Computes the gradient of an operand of `flex_attention`.

    With P the weights, G the gradient of the result, D = P * (G @ value.mT - inner) and D' the gradients of the scores
    that `Scores.differentiate` makes of D: the gradient of the query is scale * D' @ key, that of the key is
    scale * D'.mT @ query, and that of the value is P.mT @ G.

    Args:
        out: the gradient, of the operand's shape. The batch of `saved.key` and `saved.value` is that of the queries.
        of: the operand: "query", "key" or "value".
        grad: gradient of the result.
        saved: the operands of `flex_attention`, and its output `logarithm`. `inner`, contiguous: for each query the sum
            of the result's gradient times the result, minus the gradient of the natural logarithm.
        blocks: the block mask: blocks of keys for blocks of queries if `of` is "query", else the reverse.
        scores: the statements for each score.

    Raises:
        LimitExceeded: as for `flex_attention`.
    """
    query, key, value, logarithm, inner = saved
    tensors = {
        "query": {"own": query, "other": key, "own_too": grad, "other_too": value, "added": key},
        "key": {"own": key, "other": query, "own_too": value, "other_too": grad, "added": query},
        "value": {"own": key, "other": query, "added": grad},
    }[of]
    slopes = of != "value"
    rows_read = {"logarithm": logarithm, **({"inner": inner} if slopes and inner is not None else {})}
    text = {
        **_sides(of_keys=of != "query"),
        "before": "",
        "slopes": "$product_too" if slopes else "",
        "weight": _POWER,
        "found": _SLOPE if slopes else "weight = power;",
        "differentiate": scores.differentiate,
        "unseen": "0",
        "keep": KEEP_WEIGHT,
        "weigh": "",
        "finish": "$store_scaled" if slopes else "$store",
        "out_part": "0",
    }
    name = f"flex_attention_{of}_gradient"
    return _launch(name, dialect, {"out": out}, {**tensors, **rows_read}, blocks, scores, text)


class _Work(NamedTuple):
    """The division of the work.

    Args:
        side: side of a work group.
        tile: rows of a tile.
        column_blocks: blocks of as many columns for each work group.
        each: tiles of a block of the mask.
        row_tiles: tiles of all rows.
        column_parts: work groups that share the columns.
        groups: number of work groups, without a division of the other rows.
    """

    side: int
    tile: int
    column_blocks: int
    each: int
    row_tiles: int
    column_parts: int
    groups: int


def _work(dialect: Dialect, out: torch.Tensor, blocks: BlockMask) -> _Work:
    """Returns the division of the work for results of the shape of `out`."""
    batch, heads, rows, columns = out.shape
    block = min(blocks.rows, rows)
    side = side_of(dialect.target, value_dtype(out.dtype).itemsize, block)
    if side is None:
        raise LimitExceeded("attention in one pass does not fit into Target.local_memory or Target.max_group_size")
    tile, column_blocks, each, column_parts = tiles_of(side, block, columns)
    row_tiles = -(-rows // block) * each
    return _Work(side, tile, column_blocks, each, row_tiles, column_parts, batch * heads * row_tiles * column_parts)


def _launch(
    name: str,
    dialect: Dialect,
    outputs: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    blocks: BlockMask,
    scores: Scores,
    text: Mapping[str, str],
) -> Launch:
    """Returns the launch of a kernel.

    Args:
        name: the kernel's name.
        outputs: `out`, with an additional first dimension if work groups share tiles, and others, contiguous.
        tensors: `own`, `other`, `added`, `own_too` and `other_too` as in `attention.py`, and numbers for each query,
            contiguous, of three dimensions.
        blocks: the block mask.
        scores: the statements for each score.
        text: the parts of the body in which kernels differ.
    """
    out, own, other = outputs["out"], tensors["own"], tensors["other"]
    operands = {name: one for name, one in tensors.items() if one.dim() == 4}
    parts = out.shape[0] if out.dim() == 5 else 1
    out = out[0] if out.dim() == 5 else out
    batch, heads, rows, columns = out.shape
    compute, work = value_dtype(out.dtype), _work(dialect, out, blocks)
    tiles = Tiles.of(dialect, work.side, operands, scores.aligned)
    lists = {"counts": blocks.counts, "full_counts": blocks.full_counts}
    lists |= {"indices": blocks.indices, "full_indices": blocks.full_indices}
    listed = {name: one for name, one in lists.items() if one is not None}
    strided = {"out": out, **operands, **listed}
    reported: dict[str, torch.Tensor] = {}
    numbers = {"scale": (compute, scores.scale), **scores.numbers}
    if scores.report is not None:
        reported["errors"] = scores.report.words
        numbers["error_operator"] = (torch.int32, errors.operator_number(scores.report.operator))
    other_block = min(blocks.others, other.shape[2])
    return LaunchSpec(
        name,
        dialect,
        outputs={**outputs, **reported},
        inputs={**tensors, **listed, **scores.inputs},
        integers={
            "batches": batch,
            "heads": heads,
            "sharing": max(heads, other.shape[1]) // min(heads, other.shape[1]),
            "rows": rows,
            "others": other.shape[2],
            "columns": columns,
            "depth": own.shape[3],
            **({"depth_too": tensors["own_too"].shape[3]} if "own_too" in tensors else {}),
            "parts": parts,
            "row_tiles": work.row_tiles,
            "column_parts": work.column_parts,
            "block_rows": min(blocks.rows, rows),
            "block_others": other_block,
            "block_tiles": work.each,
            "block_steps": -(-other_block // work.tile),
            **strides_of(strided),
        },
        numbers=numbers,
        types=TYPES | tiles.types | {f"type_{str(one).removeprefix('torch.')}": one for one in scores.dtypes},
        functions=tiles.functions + (_CHECKS if reported else "") + scores.functions,
        constants={**constants_of(dialect, compute, tiles), "BLOCKS": work.column_blocks, "WRAPS": 0},
        value=compute,
        body=_body(blocks, scores, tiles, text),
        groups=parts * work.groups,
        group_size=work.side * work.side,
        strided={*strided, *scores.inputs},
    ).launch()


_ENDS = ("own_end", "other_end")


def _sides(of_keys: bool) -> dict[str, str]:
    """Text parts: which side has the tile's rows."""
    query, key = ("other_at", "own_at") if of_keys else ("own_at", "other_at")
    return {**heads_of(of_keys), "query": query, "key": key}


def _body(blocks: BlockMask, scores: Scores, tiles: Tiles, text: Mapping[str, str]) -> str:
    has_full = blocks.full_counts is not None
    at = "batch * {0}_batch + query_head * {0}_head + own_block * {0}_row"
    return substitute(
        BODY,
        {
            "tiles_declared": WEIGHTS + tiles.declared,
            "sums": tiles.sums,
            "prepare": _OWN_BLOCK,
            "place": split(
                "place",
                ["parts", "batches", "heads", "row_tiles", "column_parts"],
                ["part", "batch", "head", "row_tile", "column_part"],
            ),
            "first_own": "row_tile / block_tiles * block_rows + row_tile % block_tiles * TILE",
            "own_end": _ENDS[0],
            "tiles": _TILES,
            "counts": at.format("counts"),
            "full_counts": f"(index_t)load_full_counts({at.format('full_counts')})" if has_full else "0",
            "draw": _BLOCK,
            "indices": f"(index_t)load_indices({at.format('indices')} + listed * indices_column)",
            "full_indices": f"is_full ? (index_t)load_full_indices({at.format('full_indices')}"
            " + (listed - partial) * full_indices_column) : "
            if has_full
            else "",
            "scores": tiles.product("own", "other", "scores", "depth", _ENDS),
            "first_slopes": "",
            "scale": tiles.scale,
            "add": tiles.add(_ENDS[1]),
            "store": tiles.store("SUM"),
            "store_scaled": tiles.store("scale * SUM"),
            "normalize": normalize(tiles),
            "weighted": _WEIGHTED,
            "mask": scores.mask,
            "modify": scores.modify,
            "drop": "",
            "from_added": "batch * added_batch + head_of_others * added_head",
            "product_too": text["slopes"] and tiles.product("own_too", "other_too", "slopes", "depth_too", _ENDS),
            **text,
        },
    )


_CHECKS = f"""\
{errors.FUNCTIONS}
FUNCTION index_t or_first(const index_t checked) {{ return checked < 0 ? 0 : checked; }}
"""

_OWN_BLOCK = """
  const index_t own_block = row_tile / block_tiles, own_end = min(rows, (own_block + 1) * block_rows);
"""

# The tiles of all blocks that are listed for the tile's block, partial blocks first.
_TILES = """
    const index_t partial = (index_t)load_counts($counts);
    const index_t steps = (partial + $full_counts) * block_steps;
    for (index_t step = part; step < steps; step += parts)"""

_BLOCK = """
      const index_t listed = step / block_steps;
      const bool is_full = listed >= partial;
      const index_t other_block = $full_indices$indices;
      const index_t first = other_block * block_others + step % block_steps * TILE;
      const index_t other_end = min(others, (other_block + 1) * block_others);
"""

_WEIGHTED = """
          if (own_at < own_end && other_at < other_end) {
            const int in_batch = (int)batch, in_head = (int)query_head, query_at = (int)$query, key_at = (int)$key;
            bool attends = true;
            if (!is_full) { $mask }
            if (attends) {
              value_t score = scores[x][y] * scale;
              { $modify }
              $weight
            }
          }
"""

# The weight in the softmax. Queries whose modified scores are all -inf have none.
_POWER = f"""
              const index_t row_at = (batch * query_heads + query_head) * queries + $query;
              const value_t logarithm_at = (value_t)load_logarithm(row_at){_FROM_BASE_2};
              if (logarithm_at != NOTHING) {{
                const value_t power = exp(score - logarithm_at);
                $found
              }}
"""

_SLOPE = """
                value_t slope = power * (slopes[x][y] - (value_t)load_inner(row_at));
                score = scores[x][y] * scale;
                { $differentiate }
                weight = slope;
"""
