"""Negative log likelihood loss, forward and backward, of contiguous tensors.

`self` has the shape (batch, classes, positions); targets have the shape (batch, positions) and dtype int64. A target
out of range is skipped and reported (`errors.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates import errors as error_words
from torch_backplane.kernels.templates.source import (
    Launch,
    LaunchSpec,
    substitute,
    team_shared,
    team_sum,
)

REDUCTIONS = ("none", "mean", "sum")  # indexed by PyTorch's reduction numbers


class LossParams(NamedTuple):
    """Parameters of the loss.

    Args:
        weight: one weight per class.
        reduction: index into REDUCTIONS.
        ignore_index: targets with this value are skipped.
    """

    weight: torch.Tensor | None
    reduction: int
    ignore_index: int


def nll_loss(
    dialect: Dialect,
    out: torch.Tensor,
    total_weight: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    params: LossParams,
    report: error_words.Report,
) -> Launch:
    """Computes the loss.

    Args:
        out: the loss of each target (reduction 0), their weighted mean (1) or their sum (2).
        total_weight: receives the sum of weights. With reduction 0, it receives each target's weight if it has the
            targets' shape, and is not written otherwise.
    """
    weight, reduction, ignore_index = params
    batch, classes, positions = self.shape
    each = REDUCTIONS[reduction] == "none"
    keeps = each and total_weight.shape == target.shape
    parts = _parts(dialect, weight) | {
        "keep_none": "store_total_weight(element, 0);" if keeps else "",
        "keep": "store_total_weight(element, weight_of_target);" if keeps else "",
        "team_shared": team_shared(dialect),
        "meet": team_sum(dialect, "loss") + team_sum(dialect, "weights"),
        "team": str(dialect.target.team_size),
        "scale": " / TOTAL(weights)" if REDUCTIONS[reduction] == "mean" else "",
    }
    group_size = dialect.target.group_size if each else dialect.target.team_size
    return LaunchSpec(
        f"nll_loss_{REDUCTIONS[reduction]}" + ("_and_weights" if keeps else ""),
        dialect,
        outputs={"out": out, **({"total_weight": total_weight} if keeps or not each else {}), "errors": report.words},
        inputs=_inputs({"self": self}, target, weight),
        integers=_integers(batch, classes, positions),
        numbers=_numbers(ignore_index, report.operator),
        types={"int64": torch.int64},
        constants={"WRAPS": 0},
        value=value_dtype(self.dtype),
        functions=error_words.FUNCTIONS,
        body=substitute(_EACH if each else _REDUCED, parts),
        groups=-(-batch * positions // group_size) if each else 1,
        group_size=group_size,
        bounded=each,
    ).launch()


def nll_loss_backward(
    dialect: Dialect,
    out: torch.Tensor,
    grad: torch.Tensor,
    total_weight: torch.Tensor,
    target: torch.Tensor,
    params: LossParams,
    report: error_words.Report,
) -> Launch:
    """Writes the gradients at the targets to out, which has self's shape and is filled with zeros."""
    weight, reduction, ignore_index = params
    batch, classes, positions = out.shape
    each, mean = REDUCTIONS[reduction] == "none", REDUCTIONS[reduction] == "mean"
    parts = _parts(dialect, weight)
    parts |= {"grad": "element" if each else "0", "scale": " / load_total_weight(0)" if mean else ""}
    return LaunchSpec(
        f"nll_loss_{REDUCTIONS[reduction]}_backward",
        dialect,
        outputs={"out": out, "errors": report.words},
        inputs=_inputs({"grad": grad, **({"total_weight": total_weight} if mean else {})}, target, weight),
        integers=_integers(batch, classes, positions),
        numbers=_numbers(ignore_index, report.operator),
        types={"int64": torch.int64},
        constants={"WRAPS": 0},
        value=value_dtype(out.dtype),
        functions=error_words.FUNCTIONS,
        body=substitute(_BACKWARD, parts),
        groups=-(-batch * positions // dialect.target.group_size),
        group_size=dialect.target.group_size,
        bounded=True,
    ).launch()


def _integers(batch: int, classes: int, positions: int) -> dict[str, int]:
    return {"targets": batch * positions, "classes": classes, "positions": positions}


def _numbers(ignore_index: int, operator: str) -> dict[str, tuple[torch.dtype, int | float]]:
    return {
        "ignore_index": (torch.int64, ignore_index),
        "operator_number": (torch.int32, error_words.operator_number(operator)),
    }


def _inputs(
    first: dict[str, torch.Tensor], target: torch.Tensor, weight: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    return {**first, "target": target, **({"weight": weight} if weight is not None else {})}


def _parts(dialect: Dialect, weight: torch.Tensor | None) -> dict[str, str]:
    return {
        "weight": "1" if weight is None else "load_weight(chosen)",
        "choose": "const index_t chosen = target[element] == ignore_index ? -1"
        " : checked_index(errors, operator_number, target[element], classes);",
        "place": "(element / positions * classes + chosen) * positions + element % positions",
        "first": f"const index_t element = (index_t)GROUP * {dialect.target.group_size} + ITEM; "
        "if (element >= targets) return;",
    }


_EACH = """
  $first
  $choose
  if (chosen < 0) {
    store_out(element, 0);
    $keep_none
  } else {
    const value_t weight_of_target = $weight;
    store_out(element, -weight_of_target * load_self($place));
    $keep
  }
"""

_REDUCED = """
  $team_shared
  const int member = ITEM;
  SUM(loss); SUM(weights); SUM_lanes(loss); SUM_lanes(weights);
  for (index_t element = member; element < targets; element += $team) {
    $choose
    if (chosen < 0) continue;
    const value_t weight_of_target = $weight;
    ADD(weights, weight_of_target)
    ADD(loss, -weight_of_target * load_self($place))
  }
  $meet
  if (member == 0) { store_out(0, TOTAL(loss)$scale); store_total_weight(0, TOTAL(weights)); }
"""

_BACKWARD = """
  $first
  $choose
  if (chosen >= 0) store_out($place, -$weight * load_grad($grad)$scale);
"""
