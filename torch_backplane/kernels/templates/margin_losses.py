"""Margin losses, forward and backward, of contiguous tensors of shape (rows, classes).

For a target and another class, the loss increases with z = margin - self[target] + self[other] if z is positive.
Targets are int64. A target out of range is skipped and reported (see `errors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates import errors as error_words
from torch_backplane.kernels.templates.source import (
    Launch,
    LaunchSpec,
    Operands,
    row_groups,
    row_start,
    substitute,
    team_reduce,
    team_shared,
)


class MarginParams(NamedTuple):
    """Parameters of the loss.

    Args:
        weight: one weight per class.
        p: the power of z, 1 or 2.
        margin: a number.
        share: for gradients: the reciprocal of the number of elements that the loss averages.
    """

    weight: torch.Tensor | None
    p: int
    margin: Any
    share: float = 1.0


def multi_margin_loss(
    dialect: Dialect,
    out: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    params: MarginParams,
    report: error_words.Report,
) -> Launch:
    """Computes the loss of each row, which has one target: the weighted mean over classes of z (p=1) or z² (p=2)."""
    weight, p, margin, _ = params
    numbers = {"margin": (value_dtype(self.dtype), margin)}
    operands = Operands({"out": out, "errors": report.words}, _given(weight, self=self, target=target))
    body = _parts(dialect, weight) | {"cost": "z" if p == 1 else "z * z", "kernel": _MULTI}
    return _by_rows(f"multi_margin_loss_{p}", dialect, operands, body, report.operator, numbers)


def multi_margin_loss_backward(
    dialect: Dialect,
    out: torch.Tensor,
    grad: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    params: MarginParams,
    report: error_words.Report,
) -> Launch:
    """Computes the gradient of self.

    Args:
        grad: shape (rows,), any stride.
    """
    weight, p, margin, share = params
    numbers = {"margin": (value_dtype(self.dtype), margin), "share": (value_dtype(self.dtype), share)}
    operands = Operands({"out": out, "errors": report.words}, _given(weight, grad=grad, self=self, target=target))
    body = _parts(dialect, weight) | {"slope": "1" if p == 1 else "2 * z", "kernel": _MULTI_BACKWARD}
    name = f"multi_margin_loss_{p}_backward"
    return _by_rows(name, dialect, operands, body, report.operator, numbers, {"grad_step": grad.stride(0)})


def mark_targets(
    dialect: Dialect, is_target: torch.Tensor, target: torch.Tensor, report: error_words.Report
) -> Launch:
    """Sets is_target to 1 for each class that is among the row's targets, which end at the first -1, otherwise to 0."""
    rows, classes = target.shape
    return LaunchSpec(
        "mark_targets",
        dialect,
        outputs={"is_target": is_target, "errors": report.words},
        inputs={"target": target},
        integers={"rows": rows, "classes": classes},
        **_checked(report.operator),
        value=value_dtype(is_target.dtype),
        body=substitute(_MARK, {"item": _item(dialect, "row", "rows")}),
        groups=-(-rows // dialect.target.group_size),
        group_size=dialect.target.group_size,
        bounded=True,
    ).launch()


def multilabel_margin_loss(
    dialect: Dialect, out: torch.Tensor, self: torch.Tensor, target: torch.Tensor, is_target: torch.Tensor
) -> Launch:
    """Computes the loss of each row: the sum of positive z over pairs of a target and a class that is no target.

    The sum is divided by the number of classes; the margin is 1. Targets were checked before: those out of range are
    skipped silently.
    """
    inputs = {"self": self, "target": target, "is_target": is_target}
    body = _parts(dialect, None) | {"kernel": _MULTILABEL}
    return _by_rows("multilabel_margin_loss", dialect, Operands({"out": out}, inputs), body)


def multilabel_margin_loss_backward(
    dialect: Dialect,
    out: torch.Tensor,
    grad: torch.Tensor,
    self: torch.Tensor,
    labels: tuple[torch.Tensor, torch.Tensor],
    share: float,
    report: error_words.Report,
) -> Launch:
    """Computes the gradient of self; one work item per element.

    Args:
        grad: shape (rows,), any stride.
        labels: targets, and the result of `mark_targets` for them.
        share: as in `MarginParams`.
    """
    target, is_target = labels
    rows, classes = self.shape
    value = value_dtype(self.dtype)
    checked = _checked(report.operator)
    checked["numbers"]["share"] = (value, share)
    return LaunchSpec(
        "multilabel_margin_loss_backward",
        dialect,
        outputs={"out": out, "errors": report.words},
        inputs={"grad": grad, "self": self, "target": target, "is_target": is_target},
        integers={"elements": rows * classes, "classes": classes, "grad_step": grad.stride(0)},
        **checked,
        value=value,
        body=substitute(_MULTILABEL_BACKWARD, {"item": _item(dialect, "element", "elements")}),
        groups=-(-rows * classes // dialect.target.group_size),
        group_size=dialect.target.group_size,
        bounded=True,
        strided={"grad"},
    ).launch()


def _by_rows(
    name: str,
    dialect: Dialect,
    operands: Operands,
    parts: Mapping[str, str],
    operator: str | None = None,
    numbers: Mapping[str, tuple[torch.dtype, Any]] | None = None,
    integers: Mapping[str, int] | None = None,
) -> Launch:
    """Returns a launch with one team per row of `self`. With `operator`, indices are checked."""
    self = operands.inputs["self"]
    rows, classes = self.shape
    groups, group_size = row_groups(dialect, rows)
    checked: dict[str, Any] = {"types": {"int64": torch.int64}} if operator is None else _checked(operator)
    checked["numbers"] = {**checked.get("numbers", {}), **(numbers or {})}
    checked["functions"] = _SPREAD + checked.get("functions", "")
    return LaunchSpec(
        name,
        dialect,
        outputs=operands.outputs,
        inputs=operands.inputs,
        integers={"rows": rows, "classes": classes, **(integers or {})},
        **checked,
        value=value_dtype(self.dtype),
        body=substitute("$kernel", parts),
        groups=groups,
        group_size=group_size,
        bounded=dialect.target.team_size == 1,
        strided={"grad"} if "grad_step" in (integers or {}) else (),
    ).launch()


def _checked(operator: str) -> dict[str, Any]:
    """Returns the parts of a `LaunchSpec` that checked_index needs."""
    return {
        "numbers": {"operator_number": (torch.int32, error_words.operator_number(operator))},
        "types": {"int64": torch.int64},
        "constants": {"WRAPS": 0},
        "functions": error_words.FUNCTIONS,
    }


def _given(weight: torch.Tensor | None, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    return inputs if weight is None else {**inputs, "weight": weight}


def _item(dialect: Dialect, name: str, count: str) -> str:
    group = dialect.target.group_size
    return f"const index_t {name} = (index_t)GROUP * {group} + ITEM; if ({name} >= {count}) return;"


def _parts(dialect: Dialect, weight: torch.Tensor | None) -> dict[str, str]:
    return {
        "row": f"{team_shared(dialect)} {row_start(dialect)} const index_t first = row * classes;",
        "meet": team_reduce(dialect, "total"),
        "weight": "1" if weight is None else "load_weight(chosen)",
        "choose": """const index_t chosen = checked_index(errors, operator_number, target[row], classes);
  const value_t from = chosen < 0 ? 0 : margin - load_self(first + chosen);""",
        "team": str(dialect.target.team_size),
    }


def _others(statement: str) -> str:
    """Returns a loop that runs `statement` for every class i except the chosen one, and then adds `sum` to `total`.

    `@` in `statement` becomes `_lanes` in the vector part and nothing in the scalar part.
    """
    lanes, single = statement.replace("@", "_lanes"), statement.replace("@", "")
    return f"""
  SUM(sum); SUM_lanes(sum);
  for (index_t begin = (index_t)member * LANES; begin < classes; begin += $team * LANES) {{
    if (begin + LANES <= classes && (chosen < begin || chosen >= begin + LANES)) {{
      const index_t i = begin;
      const value_t_lanes z = from + load_self_lanes(first + i);
      {lanes}
    }} else
      for (index_t i = begin; i < min(begin + LANES, classes); ++i) {{
        if (i == chosen) continue;
        const value_t z = from + load_self(first + i);
        {single}
      }}
  }}
  MEET(sum);
  ADD(total, sum)
  total_lost += sum_lost;"""


# OF(x) is x as value_t; OF_lanes(x) has x in every lane.
_SPREAD = """
#define OF(x) ((value_t)(x))
#define OF_lanes(x) LANES_OF(x)
"""

_MULTI = f"""
  $row
  $choose
  SUM(total); SUM_lanes(total);
  {_others("ADD@(sum@, z > OF@(0) ? $cost : OF@(0))")}
  $meet
  if (member == 0) store_out(row, chosen < 0 ? 0 : TOTAL(total) * $weight / classes);
"""

_SLOPE = """
      const value_t@ slope = z > OF@(0) ? OF@(each) * $slope : OF@(0);
      ADD@(sum@, slope)
      store_out@(first + i, slope * up);"""

_MULTI_BACKWARD = f"""
  $row
  $choose
  const value_t each = chosen < 0 ? 0 : share * $weight, up = load_grad(row * grad_step);
  SUM(total); SUM_lanes(total);
  {_others(_SLOPE)}
  $meet
  if (member == 0 && chosen >= 0) store_out(first + chosen, -TOTAL(total) * up);
"""

_MARK = """
  $item
  const index_t first = row * classes;
  for (index_t i = 0; i < classes; ++i) store_is_target(first + i, 0);
  int ended = 0;
  for (index_t i = 0; i < classes; ++i) {
    const int64 label = target[first + i];
    ended |= label < 0;
    const index_t chosen = label == -1 ? -1 : checked_index(errors, operator_number, label, classes);
    if (chosen >= 0 && !ended) store_is_target(first + chosen, 1);
  }
"""

_MULTILABEL = f"""
  $row
  SUM(total); SUM_lanes(total);
  for (index_t k = 0; k < classes; ++k) {{
    const int64 label = target[first + k];
    if (label < 0) break;
    if (label >= classes) continue;
    const index_t chosen = (index_t)label;
    const value_t from = 1 - load_self(first + chosen);
    {_others("ADD@(sum@, z > OF@(0) && load_is_target@(first + i) == OF@(0) ? z : OF@(0))")}
  }}
  $meet
  if (member == 0) store_out(row, TOTAL(total) / classes);
"""

# A non-target class counts once for each target to which it is too close (z > 0). A target counts, as often as it is
# given, once for each non-target class that is too close. A class can be both, as is_target can contradict the targets.
_MULTILABEL_BACKWARD = """
  $item
  const index_t row = element / classes, own = element % classes, first = row * classes;
  const value_t x = load_self(element);
  const int above = load_is_target(element) == 0;
  index_t times = 0, chosen_times = 0, near = 0;
  for (index_t k = 0; k < classes; ++k) {
    const int64 label = target[first + k];
    if (label == -1) break;
    const index_t chosen = checked_index(errors, operator_number, label, classes);
    if (chosen < 0) continue;
    times += above && 1 - load_self(first + chosen) + x > 0;
    chosen_times += chosen == own;
  }
  if (chosen_times > 0)
    for (index_t i = 0; i < classes; ++i) near += load_is_target(first + i) == 0 && 1 - x + load_self(first + i) > 0;
  const value_t count = (value_t)times - (value_t)chosen_times * (value_t)near;
  store_out(element, count * share * load_grad(row * grad_step));
"""
