"""Scaled dot product attention in one pass over the keys, and its gradients.

Memory use is linear in the sequence length, not quadratic. The softmax is corrected whenever a greater score is found
(Milakov and Gimelshein, «Online normalizer calculation for softmax», 2018; Dao et al., «FlashAttention», 2022). The
gradients recompute the weights from the scores and the saved logarithms of the softmax denominators.

A work group has a tile of query rows; for the gradients of keys and values, a tile of keys. It iterates over the rows
of the other side tile by tile, computes a tile of weights in local memory, and adds the weighted rows to its results,
which are in registers. `attention_tiles.py` has the products, by work items or by matrix instructions.

With dropout, every kernel draws the kept weights again, from the seed and the offset that the forward kernel saved. A
Philox counter (`random.py`) covers four consecutive keys of a query, independently of the tiles.

If there are too few query tiles to fill the device, several work groups share one. Each handles a part of the keys, and
a second launch merges their results («Flash-Decoding», Dao et al., 2023).

If the results of a tile have more columns than a work group's registers hold, several work groups share the columns,
and each computes the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.target import LimitExceeded, Target
from torch_backplane.kernels.templates.attention_tiles import PER_ITEM, STEPS, WEIGHTS, Tiles, side_of
from torch_backplane.kernels.templates.random import scalar_words
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, split, substitute

_COLUMNS = 128  # of results of a work group, at most
_ARGUMENT_BYTES = 512  # upper bound: 10 buffers, 4 strides for each of 7 tensors, 11 sizes and 2 numbers
TYPES = {"uint64": torch.uint64, "int64": torch.int64}
_OF_KEYS = ("key", "value")  # gradients whose tiles are tiles of keys; all other kernels have tiles of queries


class Dropout(NamedTuple):
    """Dropout of weights.

    Args:
        kept: probability to keep a weight; kept weights are divided by it.
        state: int64, two elements: seed and offset. `attention` writes them, gradients read them.
        drawn: for `attention`: the generator's seed and offset, as in `random.fill`.
    """

    kept: Any
    state: torch.Tensor
    drawn: tuple[Any, Any] | None = None


class AttentionParams(NamedTuple):
    """Parameters of the weights.

    Args:
        bias: shape (batch, heads, queries, keys). Strides can be 0.
        causal: a query attends only to keys up to its own position.
        scale: factor of query @ key.mT.
        dropout: dropout of weights, if any.
        aligned: query, key, value and the result's gradient begin at multiples of 16 bytes.
    """

    bias: torch.Tensor | None
    causal: bool
    scale: float
    dropout: Dropout | None = None
    aligned: bool = False


class Saved(NamedTuple):
    """The inputs of gradients.

    Args:
        query, key, value: the operands of `attention`.
        logarithm: the output of `attention`.
        inner: same shape as `logarithm`: the row sums of the result's gradient times the result.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    logarithm: torch.Tensor
    inner: torch.Tensor | None


def attends_in_one_pass(target: Target) -> bool:
    """Whether the target supports these kernels, in any dtype."""
    return side_of(target, 8, 64) is not None and target.max_argument_bytes >= _ARGUMENT_BYTES


def attention(
    dialect: Dialect,
    out: torch.Tensor,
    logarithm: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: AttentionParams,
) -> list[Launch]:
    """Computes out = dropout(softmax(scale * query @ key.mT + bias)) @ value; 0 in rows in which all keys are masked.

    Args:
        out: shape (batch, heads, queries, columns).
        logarithm: output of shape (batch, heads, queries), contiguous, of dtype `value_dtype(out.dtype)`: the logarithm
            of the sum of the exponentials.
        query: shape (batch, heads, queries, depth).
        key: shape (batch, fewer, keys, depth). `fewer` divides `heads`: consecutive query heads share a head of key and
            value.
        value: shape (batch, fewer, keys, columns).

    Raises:
        LimitExceeded: the target does not support this (see `attends_in_one_pass`).
    """
    tensors = {"own": query, "other": key, "added": value}
    parts, keys = 1, 0
    if dialect.target.simt and (side := side_of(dialect.target, logarithm.dtype.itemsize, out.shape[2])) is not None:
        keys = min(key.shape[2], out.shape[2]) if params.causal else key.shape[2]
        parts, keys = divided(dialect.target, groups_of(side, out), side, keys)
    if parts == 1:
        outputs = {"out": out, "logarithm": logarithm}
        return [_launch("result", dialect, outputs, tensors, {}, params)]
    values = torch.empty([parts, *out.shape], dtype=logarithm.dtype, device=out.device)
    logarithms = torch.empty([parts, *logarithm.shape], dtype=logarithm.dtype, device=out.device)
    outputs = {"out": values, "logarithm": logarithms}
    first = _launch("result", dialect, outputs, tensors, {}, params, keys)
    return [first, merged(dialect, out, logarithm, values, logarithms)]


def attention_gradient(
    dialect: Dialect, out: torch.Tensor, of: str, grad: torch.Tensor, saved: Saved, params: AttentionParams
) -> Launch:
    """Computes the gradient of an operand of `attention`.

    Args:
        out: the gradient, of the operand's shape.
        of: the operand: "query", "key" or "value". "value" does not use `saved.inner`. "inner" computes `saved.inner`
            without attention's rounded result; then out has the shape (batch, heads, queries, 1).
        grad: gradient of attention's result.
    """
    query, key, value, logarithm, inner = saved
    tensors = {
        "query": {"own": query, "other": key, "own_too": grad, "other_too": value, "added": key},
        "key": {"own": key, "other": query, "own_too": value, "other_too": grad, "added": query},
        "value": {"own": key, "other": query, "added": grad},
        "inner": {"own": query, "other": key, "own_too": grad, "other_too": value},
    }[of]
    rows = {"logarithm": logarithm, **({"inner": inner} if inner is not None and of in ("query", "key") else {})}
    return _launch(of, dialect, {"out": out}, tensors, rows, params)


def _launch(
    of: str,
    dialect: Dialect,
    outputs: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    rows_read: Mapping[str, torch.Tensor],
    params: AttentionParams,
    part_keys: int | None = None,
) -> Launch:
    """Returns the launch of one kernel of attention.

    Args:
        of: "result", or as in `attention_gradient`.
        outputs: `out`; for the result also `logarithm`.
        tensors: `own`: the rows of which work groups have tiles; `other`: the rows over which they iterate; `added`:
            the rows that are weighted and added up; the gradient "inner" has none. `own_too` and `other_too`: the
            operands whose product has the gradients of the weights.
        rows_read: inputs with one number per query.
        part_keys: keys per part, if a result is split; then outputs have an additional first dimension for the parts.
    """
    out, (bias, _, scale, dropout, aligned) = outputs["out"], params
    parts = out.shape[0] if part_keys is not None else 1
    out = out if part_keys is None else out[0]
    others, other_heads = tensors["other"].shape[2], tensors["other"].shape[1]
    depth_too = tensors["own_too"].shape[3] if "own_too" in tensors else 0
    batch, heads, rows, columns = out.shape
    value = value_dtype(out.dtype)
    side = side_of(dialect.target, value.itemsize, rows)
    if side is None:
        raise LimitExceeded("attention in one pass does not fit into Target.local_memory or Target.max_group_size")
    _, blocks, row_tiles, column_parts = tiles_of(side, rows, columns)
    tiles = Tiles.of(dialect, side, tensors, aligned)
    integers = {
        "batches": batch,
        "heads": heads,
        "sharing": other_heads // heads if of in _OF_KEYS else heads // other_heads,
        "rows": rows,
        "others": others,
        "columns": columns,
        "depth": tensors["own"].shape[3],
        **({} if part_keys is None else {"parts": parts, "part_keys": part_keys}),
        **({"depth_too": depth_too} if depth_too else {}),
        "row_tiles": row_tiles,
        "column_parts": column_parts,
    }
    strided = {"out": out, **tensors, **({} if bias is None else {"bias": bias})}
    numbers, functions = {"scale": (value, scale)}, ""
    if dropout is not None:
        functions = scalar_words(dialect, value)
        numbers["kept"] = (value, dropout.kept)
        if dropout.drawn is not None:
            outputs = {**outputs, "state": dropout.state}
            numbers |= {name: (torch.int64, one) for name, one in zip(("seed", "offset"), dropout.drawn, strict=True)}
    return LaunchSpec(
        f"attention_{of}_gradient" if of != "result" else "attention" if part_keys is None else "attention_parts",
        dialect,
        outputs=outputs,
        inputs=inputs_of(tensors, bias, rows_read, dropout),
        integers={**integers, **strides_of(strided)},
        numbers=numbers,
        types={**TYPES, **tiles.types},
        functions=tiles.functions + functions,
        constants={**constants_of(dialect, value, tiles), "BLOCKS": blocks},
        value=value,
        body=_body(of, tiles, params, part_keys is not None),
        groups=parts * batch * heads * row_tiles * column_parts,
        group_size=side * side,
        strided=set(strided),
    ).launch()


def tiles_of(side: int, rows: int, columns: int) -> tuple[int, int, int, int]:
    """Returns (rows of a tile, blocks of as many columns per work group, row tiles, work groups that share columns)."""
    tile = side * PER_ITEM
    blocks = next(count for count in (1, 2, 4, 8) if count * tile >= min(columns, _COLUMNS))
    return tile, blocks, -(-rows // tile), -(-columns // (tile * blocks))


def groups_of(side: int, out: torch.Tensor) -> int:
    """Returns the number of work groups for results of the shape of `out`."""
    batch, heads, rows, columns = out.shape
    _, _, row_tiles, column_parts = tiles_of(side, rows, columns)
    return batch * heads * row_tiles * column_parts


def divided(target: Target, groups: int, side: int, keys: int) -> tuple[int, int]:
    """Returns (number of parts of the keys, keys per part), such that few work groups fill the device."""
    if not target.should_divide(groups, keys):
        return 1, keys
    tile = side * PER_ITEM
    tiles, wanted = -(-keys // tile), -(-target.enough_groups_of(side * side) // groups)
    part = max(1, tiles // wanted) * tile  # rounded down: rather more parts than fewer
    return -(-keys // part), part


def merged(
    dialect: Dialect,
    out: torch.Tensor,
    logarithm: torch.Tensor,
    values: torch.Tensor,
    logarithms: torch.Tensor,
    maximum: tuple[torch.Tensor, torch.Tensor] | None = None,
    unit: str = "",
) -> Launch:
    """Returns a launch that merges the results of parts of the keys; one work item per element.

    Args:
        maximum: the output of the maxima, and those of parts.
        unit: text that multiplies logarithms and maxima.
    """
    value = logarithms.dtype
    found = {} if maximum is None else dict(zip(("maximum", "maxima"), maximum, strict=True))
    return LaunchSpec(
        "attention_merged",
        dialect,
        outputs={"out": out, "logarithm": logarithm, **({"maximum": found["maximum"]} if found else {})},
        inputs={"values": values, "logarithms": logarithms, **({"maxima": found["maxima"]} if found else {})},
        integers={
            **dict(zip(("batches", "heads", "rows", "columns"), out.shape, strict=True)),
            "all_rows": logarithm.numel(),
            "parts": values.shape[0],
            **strides_of({"out": out}),
        },
        constants={"NOTHING": _nothing(dialect, value)},
        value=value,
        body=substitute(
            _MERGE,
            {
                "place": split("item", ["batches", "heads", "rows", "columns"], ["batch", "head", "row", "column"]),
                "unit": unit,
                "maximum": _MERGE_MAXIMA if found else "",
            },
        ),
        items=out.numel(),
        strided={"out"},
    ).launch()


def inputs_of(
    tensors: Mapping[str, torch.Tensor],
    bias: torch.Tensor | None,
    rows_read: Mapping[str, torch.Tensor],
    dropout: Dropout | None,
) -> dict[str, torch.Tensor]:
    """Returns the inputs of a kernel, in the order of its parameters."""
    state = {} if dropout is None or dropout.drawn is not None else {"state": dropout.state}
    return {**tensors, **({} if bias is None else {"bias": bias}), **rows_read, **state}


def strides_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Returns the strides as integers of a kernel: x_batch, x_head, x_row and x_column, if x has four dimensions."""
    integers: dict[str, int] = {}
    for name, tensor in tensors.items():
        integers |= dict(zip([f"{name}_{step}" for step in STEPS], tensor.stride(), strict=False))
    return integers


def constants_of(dialect: Dialect, value: torch.dtype, tiles: Tiles) -> dict[str, int | str]:
    """Returns the constants of all kernels for SIMT targets.

    KEPT tells for a query and a key of the tile whether dropout keeps their weight. SHARERS is the number of work items
    for each row of a tile.
    """
    return {
        **tiles.constants,
        "SHARERS": tiles.side // PER_ITEM,
        "NOTHING": _nothing(dialect, value),
        "KEPT(query, key)": "(kept_bits[(query) * (SIDE / 4) + (key) / 16] >> (key) % 16 & 1u)",
    }


def _nothing(dialect: Dialect, value: torch.dtype) -> str:
    """Returns the score of a masked key."""
    return f"(-{dialect.infinity(facts(value).bits)})"


class Words(NamedTuple):
    """Expressions for the score at x and y of a work item.

    Args:
        score: the score.
        power: its weight in the softmax.
        times: dropout's factor of the weight, with a leading `*`; empty without dropout.
        seen: condition that the key is not masked, appended to other conditions; can be empty.
        slope: the gradient of the score.
    """

    score: str
    power: str
    times: str
    seen: str
    slope: str


def words_of(of_keys: bool, biased: bool, causal: bool, drops: bool) -> Words:
    """Returns the expressions for a kernel.

    Args:
        of_keys: the tile's rows are keys, and the kernel iterates over queries.
        biased, causal, drops: whether there is a bias, a causal mask, and dropout.
    """
    query, key = ("other_at", "own_at") if of_keys else ("own_at", "other_at")
    bias = f"batch * bias_batch + query_head * bias_head + {query} * bias_row + {key} * bias_column"
    query_row = f"(batch * query_heads + query_head) * queries + {query}"
    power = f"(load_logarithm({query_row}) == NOTHING ? (value_t)0 : exp(score - load_logarithm({query_row})))"
    in_tile = ("item_row + x * SIDE", "item_column + y * SIDE")
    times = f" * (KEPT({', '.join(reversed(in_tile) if of_keys else in_tile)}) ? raised : (value_t)0)" if drops else ""
    return Words(
        "scores[x][y] * scale" + (f" + (value_t)load_bias({bias})" if biased else ""),
        power,
        times,
        f" && {key} <= {query}" if causal else "",
        f"{power} * (slopes[x][y]{times} - load_inner({query_row}))",
    )


def _body(of: str, tiles: Tiles, params: AttentionParams, divided: bool) -> str:
    of_keys, drops, biased = of in _OF_KEYS, params.dropout is not None, params.bias is not None
    if params.causal:
        # Queries before the tile's first key attend to none of its keys. No query of a tile attends to keys after the
        # tile's last query.
        bounds = ("first_own", "others") if of_keys else ("0", "min(others, first_own + TILE)")
    else:
        bounds = ("0", "others")
    places = ["batches", "heads", "row_tiles", "column_parts"], ["batch", "head", "row_tile", "column_part"]
    if divided:
        bounds = "part * part_keys", f"min({bounds[1]}, part * part_keys + part_keys)"
        places = ["parts", *places[0]], ["part", *places[1]]
    words = words_of(of_keys, biased, params.causal, drops)
    weights = {"result": "score", "value": words.power + words.times}
    weights["inner"] = f"{words.power} * (slopes[x][y]{words.times} - shift[x])"
    finish = tiles.store("scale * SUM" if of in ("query", "key") else "SUM")
    return substitute(
        BODY,
        {
            "tiles_declared": WEIGHTS + tiles.declared,
            "before": BEFORE if of == "result" else "",
            "sums": _MEANS if of == "inner" else tiles.sums,
            "prepare": "",
            "place": split("place", *places),
            "out_part": "part * batches * heads * rows * columns" if divided else "0",
            "part_rows": "part * batches * heads * rows" if divided else "0",
            **heads_of(of_keys),
            "first_own": "row_tile * TILE",
            "own_end": "rows",
            "tiles": f"for (index_t first = {bounds[0]}; first < {bounds[1]}; first += TILE)",
            "weighted": _WEIGHTED,
            "unit": "",
            "maximum": "",
            "scores": tiles.product("own", "other", "scores", "depth"),
            "slopes": "" if of in ("result", "value") else tiles.product("own_too", "other_too", "slopes", "depth_too"),
            "first_slopes": _FIRST_SLOPES if of == "inner" else "",
            "seen": words.seen,
            "score": words.score,
            "weight": weights.get(of, words.slope),
            "also": f"powers[x] += {words.power}; means[x] += weight;" if of == "inner" else "",
            "unseen": "NOTHING" if of == "result" else "0",
            "keep": "" if of == "inner" else KEEP_SCORE if of == "result" else KEEP_WEIGHT,
            "weigh": WEIGH + tiles.scale if of == "result" else "",
            "kept_power": "KEPT(row, j) ? power : (value_t)0" if drops else "power",
            **drawing(drops, of_keys, writes=of == "result"),
            "raised": " * raised" if drops else "",
            "from_added": "0" if of == "inner" else "batch * added_batch + head_of_others * added_head",
            "add": "" if of == "inner" else tiles.add("others"),
            "finish": normalize(tiles) if of == "result" else _AVERAGE if of == "inner" else finish,
        },
    )


def heads_of(of_keys: bool) -> dict[str, str]:
    """Returns text parts: how a head of the tile's rows, keys or queries, maps to the heads of the other rows."""
    if of_keys:
        own = {"query_heads": "heads * sharing", "queries": "others", "sharers": "sharing"}
        return {**own, "query_head": "head * sharing + shared", "head_of_others": "query_head"}
    own = {"query_heads": "heads", "queries": "rows", "sharers": "1"}
    return {**own, "query_head": "head", "head_of_others": "head / sharing"}


def drawing(drops: bool, of_keys: bool = False, writes: bool = False) -> dict[str, str]:
    """Returns the text of dropout: `drop`, once per kernel, and `draw`, once per tile, and the parts that these use."""
    return {
        "drop": (_STATE_WRITTEN if writes else _STATE_READ) if drops else "",
        "draw": _DRAW if drops else "",
        "keys": "rows" if of_keys else "others",
        "first_query": "first" if of_keys else "first_own",
        "first_key": "first_own" if of_keys else "first",
    }


# The results of parts are weighted by their softmax denominators.
_MERGE = """
  $place
  const index_t at = item / columns;
  value_t greatest = NOTHING, total = 0, sum = 0;
  for (index_t part = 0; part < parts; ++part) greatest = fmax(greatest, load_logarithms(part * all_rows + at));
  for (index_t part = 0; part < parts; ++part) {
    const value_t found = load_logarithms(part * all_rows + at);
    const value_t power = found == NOTHING ? (value_t)0 : exp(found - greatest);
    total += power;
    if (found != NOTHING) sum = fma(power, load_values((part * all_rows + at) * columns + column), sum);
  }
  store_out(batch * out_batch + head * out_head + row * out_row + column * out_column,
            total == 0 ? (value_t)0 : sum / total);
  if (column == 0) {
    store_logarithm(at, (greatest + log(total))$unit);
    $maximum
  }
"""

_MERGE_MAXIMA = """
    value_t most = NOTHING;
    for (index_t part = 0; part < parts; ++part) most = fmax(most, load_maxima(part * all_rows + at));
    store_maximum(at, most$unit);
"""

_WEIGHTED = """
          if (own_at < rows && other_at < others$seen) {
            const value_t score = $score;
            weight = $weight;
            $also
          }
"""

BODY = """
  $tiles_declared
  $before
  const index_t place = GROUP;
  $place
  const index_t first_own = $first_own, first_column = column_part * (BLOCKS * TILE);
  const index_t query_heads = $query_heads, queries = $queries;
  $drop
  $prepare
  $sums
  for (index_t shared = 0; shared < $sharers; ++shared) {
    const index_t query_head = $query_head, head_of_others = $head_of_others;
    const index_t from_added = $from_added;
    $tiles {
      $draw
      $scores
      $slopes
      $first_slopes
      for (int x = 0; x < PER_ITEM; ++x)
        for (int y = 0; y < PER_ITEM; ++y) {
          const index_t own_at = first_own + item_row + x * SIDE, other_at = first + item_column + y * SIDE;
          value_t weight = $unseen;
          $weighted
          $keep
        }
      BARRIER;
      $weigh
      $add
    }
  }
  $finish
"""

KEEP_SCORE = "weights[item_row + x * SIDE][item_column + y * SIDE] = weight;"
KEEP_WEIGHT = "KEEP(item_row + x * SIDE, item_column + y * SIDE, weight);"

# The keep flags of a tile. A work item draws those of 16 keys of one query. The barriers of the products separate the
# draw from its uses; the barrier behind the weights separates the uses from the next draw.
_DROP = """
  LOCAL uint kept_bits[ITEMS];
  const value_t raised = kept > 0 ? 1 / kept : (value_t)0;
"""
_STATE_WRITTEN = (
    _DROP
    + """
  if (GROUP == 0 && ITEM == 0) { store_state(0, seed); store_state(1, offset); }
"""
)
_STATE_READ = (
    _DROP
    + """
  const int64 seed = load_state(0), offset = load_state(1);
"""
)
_DRAW = """
      const index_t drawn_query = $first_query + ITEM / (SIDE / 4), drawn_key = $first_key + ITEM % (SIDE / 4) * 16;
      const index_t rows_before = (batch * query_heads + query_head) * queries + drawn_query, fours = ($keys + 3) / 4;
      const index_t end = drawn_query < queries ? min(fours, drawn_key / 4 + 4) : 0;
      uint bits = 0;
      for (index_t four = drawn_key / 4; four < end; ++four) {
        uint words[4];
        philox(words, (uint64)seed, (uint64)offset, (uint64)rows_before * (uint64)fours + (uint64)four);
        for (int k = 0; k < 4; ++k) bits |= (above_zero(words[k]) <= kept ? 1u : 0u) << (int)(four % 4 * 4 + k);
      }
      kept_bits[ITEM] = bits;
"""

# For each row of a tile of scores: the maximum so far, the sum of the exponentials, and the correction factor of the
# previous sums when the maximum grows.
BEFORE = """
  LOCAL value_t greatest[TILE], total[TILE], correction[TILE], found_by[ITEMS];
  for (int row = ITEM; row < TILE; row += ITEMS) { greatest[row] = NOTHING; total[row] = 0; }
"""

WEIGH = """
      const int row = ITEM / SHARERS, sharer = ITEM % SHARERS;
      value_t found = NOTHING;
      for (int j = sharer; j < TILE; j += SHARERS) found = fmax(found, weights[row][j]);
      found_by[ITEM] = found;
      BARRIER;
      found = greatest[row];
      for (int one = 0; one < SHARERS; ++one) found = fmax(found, found_by[row * SHARERS + one]);
      BARRIER;
      value_t part_total = 0;
      for (int j = sharer; j < TILE; j += SHARERS) {
        const value_t power = weights[row][j] == NOTHING ? (value_t)0 : exp(weights[row][j] - found);
        KEEP(row, j, $kept_power);
        part_total += power;
      }
      found_by[ITEM] = part_total;
      BARRIER;
      if (sharer == 0) {
        correction[row] = greatest[row] == NOTHING ? (value_t)0 : exp(greatest[row] - found);
        value_t row_total = total[row] * correction[row];
        for (int one = 0; one < SHARERS; ++one) row_total += found_by[row * SHARERS + one];
        total[row] = row_total;
        greatest[row] = found;
      }
      BARRIER;
"""

# The saved logarithm is rounded, so the weights (`powers`) of a row do not add up to exactly one. All have the same
# relative error, which cancels in a weighted mean. Gradients subtract such a mean of the slopes (`inner`) from the
# slopes. The two almost cancel if a row has one large weight, or if values are similar. For precision, the mean is
# therefore computed of the differences from the first slope (`shift`).
_MEANS = """
  value_t powers[PER_ITEM], means[PER_ITEM], shift[PER_ITEM];
  for (int x = 0; x < PER_ITEM; ++x) { powers[x] = 0; means[x] = 0; shift[x] = 0; }
"""

_FIRST_SLOPES = """
      BARRIER;
      if (item_column == 0)
        for (int x = 0; x < PER_ITEM; ++x) weights[item_row + x * SIDE][0] = slopes[x][0];
      BARRIER;
      if (first == 0)
        for (int x = 0; x < PER_ITEM; ++x) shift[x] = weights[item_row + x * SIDE][0];
"""

_ADD_UP = """
  BARRIER;
  for (int x = 0; x < PER_ITEM; ++x) weights[item_row + x * SIDE][item_column] = NUMBERS[x];
  BARRIER;
  for (int x = 0; x < PER_ITEM; ++x) {
    NUMBERS[x] = 0;
    for (int i = 0; i < SIDE; ++i) NUMBERS[x] += weights[item_row + x * SIDE][i];
  }
"""

_AVERAGE = (
    _ADD_UP.replace("NUMBERS", "powers")
    + _ADD_UP.replace("NUMBERS", "means")
    + """
  if (item_column == 0)
    for (int x = 0; x < PER_ITEM; ++x) {
      const index_t row = first_own + item_row + x * SIDE;
      if (row < rows)
        store_out(batch * out_batch + head * out_head + row * out_row,
                  powers[x] == 0 ? (value_t)0 : shift[x] + means[x] / powers[x]);
    }
"""
)


def normalize(tiles: Tiles) -> str:
    """Returns statements that store results and logarithms."""
    return tiles.store("total[tile_row] == 0 ? (value_t)0 : SUM / total[tile_row]$raised") + _STORE_LOGARITHMS


_STORE_LOGARITHMS = """
  if (column_part == 0)
    for (int row = ITEM; row < TILE; row += ITEMS)
      if (first_own + row < $own_end) {
        const index_t row_at = $part_rows + (batch * heads + head) * rows + first_own + row;
        store_logarithm(row_at, (greatest[row] + log(total[row]))$unit);
        $maximum
      }
"""
