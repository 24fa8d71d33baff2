"""The text of attention and its gradients where a work item is a thread's: its lanes are rows.

A work item has one or two vectors of rows: of queries, and for the gradients of keys and of values of keys. It keeps
their columns in memory of its own, one vector behind the other, and goes through the rows of the other side, _STEP of
them at a time, with the softmax corrected as in `attention.py`. A row of the other side comes as single numbers, each
multiplied with vectors, so that it is read once, by any strides, and nothing is added up across lanes. Sums over the
rows of a step are added to those before, so that rounding errors do not grow with the number of rows. Where the columns
of its own rows are neighbours in memory, they are turned in registers on their way there, and results on theirs back.
"""

from __future__ import annotations

from collections.abc import Container

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.templates.source import split, substitute
from torch_backplane.kernels.templates.spelling import lane_count

_STEP = 64
_BLOCK = 8  # rows of the other side, and columns, whose sums are in registers at a time
_WIDTHS = (32, 64, 128, 256)  # a work item has room for so many columns of its rows, or of results

MOST_COLUMNS = _WIDTHS[-1]


def vectors_of(dialect: Dialect, value: torch.dtype, rows: int) -> int:
    """Of rows that a work item has."""
    return 2 if rows > lane_count(dialect, value) else 1


def width_of(columns: int) -> int:
    """The room for columns; at most MOST_COLUMNS."""
    return next(width for width in _WIDTHS if width >= columns)


def constants_of(vectors: int, columns: int, depth: int, depth_too: int) -> dict[str, int | str]:
    """Of these kernels, beside NOTHING and LANES."""
    return {
        "VECTORS": vectors,
        "TILE": f"({vectors} * LANES)",
        "STEP": _STEP,
        "COLUMNS": width_of(columns),
        "DEPTH": width_of(depth),
        "DEPTH_TOO": width_of(depth_too),
        "LANE_OF(tile, i, lane)": "((value_t*)(tile))[(i) * TILE + (lane)]",
    }


def heads_of(of_keys: bool) -> dict[str, str]:
    """Parts of both forms' text: how a head of the item's rows, keys or queries, goes with those of the others."""
    if of_keys:
        own = {"query_heads": "heads * sharing", "queries": "others", "sharers": "sharing"}
        return {**own, "query_head": "head * sharing + shared", "head_of_others": "query_head"}
    own = {"query_heads": "heads", "queries": "rows", "sharers": "1"}
    return {**own, "query_head": "head", "head_of_others": "head / sharing"}


def body(of: str, biased: bool, causal: bool, vectors: int, turned: Container[str]) -> str:
    """The statements of the kernel that computes `of`, as in `attention.py`.

    Args:
        turned: those of "own", "own_too" and "out" whose columns are neighbours in memory; with any, `lanes_turn` is
            needed.
    """
    of_keys = of in ("key", "value")
    slopes = of not in ("result", "value")
    bounds = ("0", "others")
    if causal:
        # Queries before the first key see none, and no query sees keys behind the last one's.
        bounds = ("first_own", "others") if of_keys else ("0", "min(others, first_own + (index_t)TILE)")
    query_row = "(batch * query_heads + query_head) * queries"
    rows_of = ["logarithm", "inner"] if of in ("query", "key") else [] if of == "result" else ["logarithm"]
    own_rows = "\n".join(
        f"  value_t_lanes {name}_tile[VECTORS];\n"
        f"  for (int lane = 0; lane < TILE; ++lane)\n"
        f"    LANE_OF({name}_tile, 0, lane) = load_{name}(own_rows + min(first_own + lane, rows - 1));"
        for name in rows_of
    )
    other_rows = " ".join(f"const value_t one_{name} = load_{name}({query_row} + first + j);" for name in rows_of)
    logarithm, inner = (
        f"LANES_OF(one_{name})" if of_keys else f"{name}_tile[v]" for name in ("logarithm", "inner")
    )
    power = f"({logarithm} == NOTHING ? LANES_OF(0) : exp(weights[j][v] - {logarithm}))"
    weight = {
        "query": f"{power} * (slopes[j][v] - {inner})",
        "key": f"{power} * (slopes[j][v] - {inner})",
        "value": power,
        "inner": "power * (slopes[j][v] - shift[v])",
        "result": "",
    }[of]
    also = f"const value_t_lanes power = {power}; powers[v] += power;" if of == "inner" else ""
    weigh = _WEIGH if of == "result" else _WEIGHT
    finish = {
        "query": "LANES_OF(scale) * result[i][v]",
        "key": "LANES_OF(scale) * result[i][v]",
        "value": "result[i][v]",
        "inner": "powers[v] == 0 ? LANES_OF(0) : shift[v] + result[i][v] / powers[v]",
        "result": "total[v] == 0 ? LANES_OF(0) : result[i][v] / total[v]",
    }[of]
    bias_row, bias_lane = ("row", "column") if of_keys else ("column", "row")
    return substitute(
        _BODY,
        {
            "place": split("place", ["batches", "heads", "row_tiles"], ["batch", "head", "row_tile"]),
            # The longest first, so that all threads end at about the same time.
            "tile": "row_tiles - 1 - row_tile" if causal and not of_keys else "row_tile",
            **heads_of(of_keys),
            "from": bounds[0],
            "to": bounds[1],
            "own": _own("own", "DEPTH", "depth", "own" in turned),
            "own_too": _own("own_too", "DEPTH_TOO", "depth_too", "own_too" in turned) if slopes else "",
            "before": {"result": _BEFORE, "inner": _BEFORE_INNER}.get(of, ""),
            "own_rows": "" if of_keys else own_rows,
            "other_rows": other_rows if of_keys else "",
            "scores": _product("weights", "own", "other", "depth", vectors),
            "slopes": "value_t_lanes slopes[STEP][VECTORS];"
            + _product("slopes", "own_too", "other_too", "depth_too", vectors)
            if slopes
            else "",
            "bias": substitute(_BIAS, {"row": bias_row, "lane": bias_lane}) if biased else "",
            "biased": " + bias_tile[v]" if biased else "",
            "unseen": substitute(_UNSEEN, {"than": "<" if not of_keys else ">"}) if causal else "",
            "shift": substitute(_SHIFT, {"from": bounds[0]}) if of == "inner" else "",
            "weigh": weigh,
            "weight": weight,
            "also": also,
            "add": _ADD_ONES if of == "inner" else _add(of, vectors),
            "finish": finish,
            "turn_back": _TURN_BACK if "out" in turned else "",
            "finished": _LOGARITHM if of == "result" else "",
        },
    )


def _own(name: str, room: str, depth: str, turned: bool) -> str:
    row = f"batch * {name}_batch + head * {name}_head + min(first_own + %s, rows - 1) * {name}_row"
    squares = f"""
  for (; {name}_turned + LANES <= {depth}; {name}_turned += LANES)
    for (int v = 0; v < VECTORS; ++v) {{
      value_t_lanes square[LANES];
      for (int i = 0; i < LANES; ++i) square[i] = load_{name}_lanes({row % "v * LANES + i"} + {name}_turned);
      lanes_turn(square);
      for (int i = 0; i < LANES; ++i) {name}_tile[{name}_turned + i][v] = square[i];
    }}"""
    return f"""
  value_t_lanes {name}_tile[{room}][VECTORS];
  index_t {name}_turned = 0;{squares if turned else ""}
  for (int lane = 0; lane < TILE; ++lane) {{
    const index_t at = {row % "lane"};
    for (index_t k = {name}_turned; k < {depth}; ++k)
      LANE_OF({name}_tile, k, lane) = (value_t)load_{name}(at + k * {name}_column);
  }}"""


def _product(result: str, own: str, other: str, depth: str, vectors: int) -> str:
    """Statements that make a step of `result`: of rows of `other` with the item's own."""
    each = [(x, v) for x in range(_BLOCK) for v in range(vectors)]
    ats = " ".join(
        f"const {other}_pointer row{x} = from_{other} + min(first + j + {x}, others - 1) * {other}_row;"
        for x in range(_BLOCK)
    )
    steps = "\n".join(
        f"          {{ const value_t_lanes one = LANES_OF((value_t)load_{other}_from(row{x}, k * {other}_column)); "
        + " ".join(f"sum{x}_{v} = fma(one, own{v}, sum{x}_{v});" for v in range(vectors))
        + " }"
        for x in range(_BLOCK)
    )
    return f"""
      const {other}_pointer from_{other} = {other} + batch * {other}_batch + head_of_others * {other}_head;
      for (int j = 0; j < count; j += {_BLOCK}) {{
        {ats}
        {" ".join(f"value_t_lanes sum{x}_{v} = LANES_OF(0);" for x, v in each)}
        for (index_t k = 0; k < {depth}; ++k) {{
          {" ".join(f"const value_t_lanes own{v} = {own}_tile[k][{v}];" for v in range(vectors))}
{steps}
        }}
        {" ".join(f"{result}[j + {x}][{v}] = sum{x}_{v};" for x, v in each)}
      }}"""


def _add(of: str, vectors: int) -> str:
    """Statements that add what the rows of a step weigh."""
    each = [(x, v) for x in range(_BLOCK) for v in range(vectors)]
    ats = " ".join(
        f"const added_pointer column{x} = from_added + min(i + {x}, columns - 1) * added_column;" for x in range(_BLOCK)
    )
    steps = "\n".join(
        f"          {{ const value_t_lanes one = LANES_OF((value_t)load_added_from(column{x}, j * added_row)); "
        + " ".join(f"sum{x}_{v} = fma(one, weight{v}, sum{x}_{v});" for v in range(vectors))
        + " }"
        for x in range(_BLOCK)
    )
    corrected = "fma(result[i + {x}][{v}], correction[{v}], sum{x}_{v})"
    total = corrected if of == "result" else "result[i + {x}][{v}] + sum{x}_{v}"
    stores = " ".join(f"result[i + {x}][{v}] = {total.format(x=x, v=v)};" for x, v in each)
    return f"""
      const added_pointer from_added = added + batch * added_batch + head_of_others * added_head + first * added_row;
      for (index_t i = 0; i < columns; i += {_BLOCK}) {{
        {ats}
        {" ".join(f"value_t_lanes sum{x}_{v} = LANES_OF(0);" for x, v in each)}
        for (int j = 0; j < count; ++j) {{
          {" ".join(f"const value_t_lanes weight{v} = weights[j][{v}];" for v in range(vectors))}
{steps}
        }}
        {stores}
      }}"""


_BODY = """
  const index_t place = GROUP;
  $place
  const index_t first_own = ($tile) * TILE, own_rows = (batch * heads + head) * rows;
  const index_t query_heads = $query_heads, queries = $queries;
  $own
  $own_too
  value_t_lanes result[COLUMNS][VECTORS];
  for (int i = 0; i < COLUMNS; ++i)
    for (int v = 0; v < VECTORS; ++v) result[i][v] = LANES_OF(0);
  $before
  $own_rows
  for (index_t shared = 0; shared < $sharers; ++shared) {
    const index_t query_head = $query_head, head_of_others = $head_of_others;
    for (index_t first = $from; first < $to; first += STEP) {
      const int count = (int)min((index_t)STEP, $to - first);
      value_t_lanes weights[STEP][VECTORS];
      $scores
      $slopes
      for (int j = 0; j < count; ++j) {
        $bias
        for (int v = 0; v < VECTORS; ++v) weights[j][v] = weights[j][v] * LANES_OF(scale)$biased;
      }
      $unseen
      $shift
      $weigh
      $add
    }
  }
  for (index_t i = 0; i < columns; ++i)
    for (int v = 0; v < VECTORS; ++v) result[i][v] = $finish;
  const index_t out_at = batch * out_batch + head * out_head + first_own * out_row;
  index_t stored = 0;
  $turn_back
  for (int lane = 0; lane < TILE && first_own + lane < rows; ++lane)
    for (index_t i = stored; i < columns; ++i)
      store_out(out_at + lane * out_row + i * out_column, LANE_OF(result, i, lane));
  $finished
"""

_BIAS = """
        value_t_lanes bias_tile[VECTORS];
        const index_t bias_at = batch * bias_batch + query_head * bias_head + (first + j) * bias_$row;
        for (int lane = 0; lane < TILE; ++lane)
          LANE_OF(bias_tile, 0, lane) = (value_t)load_bias(bias_at + min(first_own + lane, rows - 1) * bias_$lane);"""

# Only steps that cross the diagonal have what is not seen.
_UNSEEN = """
      if (first < first_own + (index_t)TILE && first + count > first_own)
        for (int j = 0; j < count; ++j)
          for (int lane = 0; lane < TILE; ++lane)
            if (first_own + lane $than first + j) LANE_OF(weights, j, lane) = NOTHING;"""

_BEFORE = """
  value_t_lanes greatest[VECTORS], total[VECTORS];
  for (int v = 0; v < VECTORS; ++v) { greatest[v] = LANES_OF(NOTHING); total[v] = LANES_OF(0); }"""

_TURN_BACK = """
  for (; stored + LANES <= columns; stored += LANES)
    for (int v = 0; v < VECTORS; ++v) {
      value_t_lanes square[LANES];
      for (int i = 0; i < LANES; ++i) square[i] = result[stored + i][v];
      lanes_turn(square);
      for (int i = 0; i < LANES; ++i)
        if (first_own + v * LANES + i < rows) store_out_lanes(out_at + (v * LANES + i) * out_row + stored, square[i]);
    }"""

# As in attention.py: the mean of powers has no error of the logarithm's rounding, and that of what differs from the
# first one, which each query sees, none where all are alike.
_SHIFT = """
      if (first == $from)
        for (int v = 0; v < VECTORS; ++v) shift[v] = slopes[0][v];"""

_BEFORE_INNER = """
  value_t_lanes powers[VECTORS], shift[VECTORS];
  for (int v = 0; v < VECTORS; ++v) powers[v] = LANES_OF(0);"""

_WEIGH = """
      value_t_lanes correction[VECTORS];
      for (int v = 0; v < VECTORS; ++v) {
        value_t_lanes found = greatest[v], part = LANES_OF(0);
        for (int j = 0; j < count; ++j) found = weights[j][v] > found ? weights[j][v] : found;
        correction[v] = greatest[v] == NOTHING ? LANES_OF(0) : exp(greatest[v] - found);
        for (int j = 0; j < count; ++j) {
          const value_t_lanes power = weights[j][v] == NOTHING ? LANES_OF(0) : exp(weights[j][v] - found);
          weights[j][v] = power;
          part += power;
        }
        total[v] = fma(total[v], correction[v], part);
        greatest[v] = found;
      }"""

_WEIGHT = """
      for (int j = 0; j < count; ++j) {
        $other_rows
        for (int v = 0; v < VECTORS; ++v) {
          $also
          weights[j][v] = $weight;
        }
      }"""

_ADD_ONES = """
      for (int j = 0; j < count; ++j)
        for (int v = 0; v < VECTORS; ++v) result[0][v] += weights[j][v];"""

_LOGARITHM = """
  for (int v = 0; v < VECTORS; ++v) total[v] = greatest[v] + log(total[v]);
  for (int lane = 0; lane < TILE && first_own + lane < rows; ++lane)
    store_logarithm(own_rows + first_own + lane, LANE_OF(total, 0, lane));"""
