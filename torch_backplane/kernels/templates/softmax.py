"""softmax and log_softmax, forward and backward, along one dimension of contiguous tensors.

Along the innermost dimension, a team of work items handles each row. Along other dimensions, a work item handles LANES
adjacent columns.
"""

from __future__ import annotations

import re

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.templates.source import (
    Launch,
    LaunchSpec,
    row_groups,
    row_loop,
    row_start,
    rows_and_columns,
    rows_per_group,
    split,
    team_reduce,
    team_shared,
    team_sum,
)
from torch_backplane.kernels.templates.spelling import lane_count


def softmax(dialect: Dialect, out: torch.Tensor, self: torch.Tensor, dim: int, log: bool) -> Launch:
    """Computes out = softmax or log_softmax of self along dim. Both are contiguous, of the same shape and not empty."""
    value = value_dtype(out.dtype)
    infinity = dialect.infinity(facts(value).bits)
    passes = {
        # One instruction; fmax takes several. NaN never becomes the maximum, but makes the total NaN.
        "greatest": "const value_t@ value@ = load_self@(at); greatest@ = value@ > greatest@ ? value@ : greatest@;",
        "total": "ADD@(total@, exp(load_self@(at) - greatest))",
        "store": "store_out@(at, exp(load_self@(at) - greatest) * scale);",
    }
    if log:
        passes["store"] = "store_out@(at, (load_self@(at) - greatest) - logarithm);"
    elif not dialect.target.simt and out.dtype == value:
        # The exponential dominates the time and the row stays in the cache, so compute it once and keep it in out. In
        # float16 or bfloat16 that would round twice.
        passes["total"] = (
            "const value_t@ power@ = exp(load_self@(at) - greatest); ADD@(total@, power@) store_out@(at, power@);"
        )
        passes["store"] = "store_out@(at, load_out@(at) * scale);"
    before_store = "const {t} logarithm = log(TOTAL(total));" if log else "const {t} scale = (value_t)1 / TOTAL(total);"
    name = ("log_" if log else "") + "softmax"
    if rows_and_columns(self.shape, dim)[2] == 1:
        body = f"""
  {team_shared(dialect)}
  {row_start(dialect)}
  value_t greatest = -{infinity};
  value_t_lanes greatest_lanes = LANES_OF(-{infinity});
  SUM(total); SUM_lanes(total);
  const index_t row_at = row * size;
  {_along_row(dialect, passes["greatest"])}
  greatest = fmax(greatest, lanes_max(greatest_lanes));
  {team_reduce(dialect, "greatest", "fmax({0}, {1})")}
  {_along_row(dialect, passes["total"])}
  {team_sum(dialect, "total")}
  {before_store.format(t="value_t")}
  {_along_row(dialect, passes["store"])}
"""
        return _rows_call(name, dialect, {"out": out}, {"self": self}, dim, value, body)
    body = _down_columns(
        _in_each_lane(
            f"""
  value_t@ greatest = OF@(-{infinity}), total = OF@(0), total@_lost = OF@(0);
  DOWN {{ {passes["greatest"]} }}
  DOWN {{ {passes["total"]} }}
  {before_store.format(t="value_t@")}
  DOWN {{ {passes["store"]} }}
"""
        )
    )
    return _columns_call(name, dialect, {"out": out}, {"self": self}, dim, value, body)


def softmax_backward(
    dialect: Dialect, out: torch.Tensor, grad: torch.Tensor, result: torch.Tensor, dim: int, log: bool
) -> Launch:
    """Computes the gradient of softmax's input from its result and the result's gradient.

    All tensors are contiguous, of the same shape and not empty.
    """
    value = value_dtype(grad.dtype)
    total = f"ADD@(total@, load_grad@(at){'' if log else ' * load_result@(at)'})"
    name = ("log_" if log else "") + "softmax_backward"
    tensors = {"grad": grad, "result": result}

    def store(total: str) -> str:
        if log:
            return f"store_out@(at, load_grad@(at) - exp(load_result@(at)) * {total});"
        return f"store_out@(at, (load_grad@(at) - {total}) * load_result@(at));"

    if rows_and_columns(grad.shape, dim)[2] == 1:
        body = f"""
  {team_shared(dialect)}
  {row_start(dialect)}
  SUM(total); SUM_lanes(total);
  const index_t row_at = row * size;
  {_along_row(dialect, total)}
  {team_sum(dialect, "total")}
  {_along_row(dialect, store("TOTAL(total)"))}
"""
        return _rows_call(name, dialect, {"out": out}, tensors, dim, value, body)
    body = _down_columns(
        f"value_t@ total@ = OF@(0), total@_lost = OF@(0); DOWN {{ {total} }} DOWN {{ {store('TOTAL(total@)')} }}"
    )
    return _columns_call(name, dialect, {"out": out}, tensors, dim, value, body)


def _along_row(dialect: Dialect, statement: str) -> str:
    return row_loop(dialect, f"const index_t at = row_at + i; {statement}")


def _rows_call(
    name: str,
    dialect: Dialect,
    outputs: dict[str, torch.Tensor],
    inputs: dict[str, torch.Tensor],
    dim: int,
    value: torch.dtype,
    body: str,
) -> Launch:
    rows, size, _ = rows_and_columns(next(iter(inputs.values())).shape, dim)
    groups, group_size = row_groups(dialect, rows)
    return LaunchSpec(
        f"{name}_rows",
        dialect,
        outputs=outputs,
        inputs=inputs,
        integers={"rows": rows, "size": size},
        value=value,
        body=body,
        groups=groups,
        group_size=group_size,
        bounded=dialect.target.team_size == 1,
    ).launch()


def _down_columns(text: str) -> str:
    """Returns the body that runs `text` on LANES columns, or on each of the last columns if fewer are left.

    DOWN in `text` becomes the loop over the size.
    """
    text = text.replace("DOWN", "for (index_t k = 0, at = first; k < size; ++k, at += columns)")
    by_lanes = text.replace("OF@", "LANES_OF").replace("@", "_lanes")
    singly = text.replace("OF@", "").replace("@", "")
    return f"""
  const index_t item = (index_t)GROUP * ITEMS + ITEM;
  const index_t blocks = (columns + LANES - 1) / LANES;
  if (item >= rows * blocks) return;
  {split("item", ["rows", "blocks"], ["row", "block"])}
  const index_t column = block * LANES, first = row * size * columns + column;
  if (column + LANES <= columns) {{ {by_lanes} return; }}
  for (index_t rest = column; rest < columns; ++rest) {{
    const index_t first = row * size * columns + rest;
    {singly}
  }}
"""


def _in_each_lane(text: str) -> str:
    """Marks the variables of `text` that exist once per column with @, so that there is one per lane."""
    return re.sub(r"\b(greatest|total|scale|logarithm)\b(?!@)", r"\1@", text)


def _columns_call(
    name: str,
    dialect: Dialect,
    outputs: dict[str, torch.Tensor],
    inputs: dict[str, torch.Tensor],
    dim: int,
    value: torch.dtype,
    body: str,
) -> Launch:
    rows, size, columns = rows_and_columns(next(iter(inputs.values())).shape, dim)
    blocks = rows * -(-columns // lane_count(dialect, value))
    group_size = rows_per_group(dialect)
    return LaunchSpec(
        f"{name}_columns",
        dialect,
        outputs=outputs,
        inputs=inputs,
        integers={"rows": rows, "size": size, "columns": columns},
        constants={"ITEMS": group_size},
        value=value,
        body=body,
        groups=-(-blocks // group_size),
        group_size=group_size,
        bounded=True,
    ).launch()
