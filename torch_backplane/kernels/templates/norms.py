"""Layer, group, batch and RMS norm, forward and backward, of contiguous tensors.

All of them normalize sets of elements; a team of work items handles each set. A set has `pieces` runs of `length`
consecutive elements. There is one weight and bias per position in the set (layer and RMS norm), per piece (group norm)
or per set (batch norm). `Sets` describes this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.source import (
    Launch,
    LaunchSpec,
    row_groups,
    row_loop,
    row_start,
    rows_per_group,
    substitute,
    team_shared,
    team_sum,
)
from torch_backplane.kernels.templates.spelling import lane_count


@dataclass(frozen=True)
class Sets:
    """Which elements are normalized together.

    Args:
        norm: "layer", "group" or "batch"; determines the order in memory and the indexing of weight and bias.
        count: number of sets.
        pieces: runs per set.
        length: elements per run.
        groups: number of groups of a group norm.
    """

    norm: str
    count: int
    pieces: int
    length: int
    groups: int = 1

    @staticmethod
    def layer(rows: int, size: int) -> Sets:
        return Sets("layer", rows, 1, size)

    @staticmethod
    def group(batch: int, channels: int, length: int, groups: int) -> Sets:
        return Sets("group", batch * groups, channels // groups, length, groups)

    @staticmethod
    def batch(batch: int, channels: int, length: int) -> Sets:
        return Sets("batch", channels, batch, length)

    def integers(self) -> dict[str, int]:
        return {"rows": self.count, "pieces": self.pieces, "length": self.length, "groups": self.groups}


# Offset of a piece; and index of an element's weight.
_PIECE_AT = {
    "layer": "row * length",
    "group": "(row * pieces + piece) * length",
    "batch": "(piece * rows + row) * length",
}
_WEIGHT_AT = {"layer": "i", "group": "row % groups * pieces + piece", "batch": "row"}


class Affine(NamedTuple):
    """Weight and bias of a norm, or the requested gradients of them."""

    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class Statistics(NamedTuple):
    """The statistics of a forward pass.

    Args:
        mean, rstd: outputs, one element per set. Without mean, the mean is zero (RMS norm). Without both, the mean and
            variance in `running` are used, as in batch norm's evaluation mode.
        running: running mean and variance (batch norm); updated with `momentum` if rstd is given.
    """

    mean: torch.Tensor | None
    rstd: torch.Tensor | None
    running: tuple[torch.Tensor, torch.Tensor] | None = None
    momentum: float = 0.0


class Saved(NamedTuple):
    """The inputs of a backward pass. `mean` is None for RMS norm."""

    grad: torch.Tensor
    self: torch.Tensor
    weight: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor


class Evaluated(NamedTuple):
    """How the statistics in `Saved` were obtained.

    Args:
        training: whether mean and rstd were computed from self.
        variance: whether rstd holds variances, such as the running variance.
        eps: is added to these variances.
    """

    training: bool = True
    variance: bool = False
    eps: float = 0.0


def norm(
    dialect: Dialect,
    sets: Sets,
    out: torch.Tensor,
    self: torch.Tensor,
    affine: Affine,
    statistics: Statistics,
    eps: float,
) -> Launch:
    """Computes out = (self - mean) / sqrt(variance + eps) * weight + bias."""
    (weight, bias), (mean, rstd, running, momentum) = affine, statistics
    value = value_dtype(out.dtype)
    outputs, inputs = {"out": out}, {"self": self}
    update = running is not None and rstd is not None
    for name, tensor in (("mean_of", mean), ("rstd_of", rstd)):
        if tensor is not None:
            outputs[name] = tensor
    if running is not None:
        (outputs if update else inputs).update(running_mean=running[0], running_var=running[1])
    inputs |= _given(weight=weight, bias=bias)
    given = (mean is not None, rstd is not None, update, weight is not None, bias is not None)
    body = _norm_body(dialect, sets.norm, *given)
    numbers = {"eps": (value, eps), **({"momentum": (value, momentum)} if update else {})}
    return _launch(f"{sets.norm}_norm", dialect, sets, outputs, inputs, body, numbers)


@lru_cache(maxsize=256)
def _norm_body(
    dialect: Dialect, norm: str, has_mean: bool, has_rstd: bool, update: bool, has_weight: bool, has_bias: bool
) -> str:
    centred = "((load_self@(at) - mean) - mean_low)" if has_mean else "(load_self@(at) - mean)"
    statement = f"const value_t@ normal@ = {centred} * rstd; store_out@(at, {_affine(norm, has_weight, has_bias)});"
    return f"""
  {team_shared(dialect)}
  {row_start(dialect)}
  const value_t count = (value_t)pieces * length;
  {_statistics(dialect, norm, has_mean) if has_rstd else _GIVEN_STATISTICS}
  {"if (member == 0) store_rstd_of(row, rstd);" if has_rstd else ""}
  {"if (member == 0) store_mean_of(row, mean);" if has_mean else ""}
  {_UPDATE if update else ""}
  {_pieces(dialect, norm, statement)}
"""


def norm_backward(
    dialect: Dialect,
    sets: Sets,
    out: torch.Tensor,
    saved: Saved,
    wanted: Affine = Affine(),  # noqa: B008, it cannot be changed
    how: Evaluated = Evaluated(),  # noqa: B008, it cannot be changed
) -> Launch:
    """Computes the gradient of self and, for batch norm, those of weight and bias, which exist once per set."""
    (grad, self, weight, mean, rstd), (weight_grad, bias_grad), (training, variance, eps) = saved, wanted, how
    value = value_dtype(out.dtype)
    inputs = {"grad": grad, "self": self, "rstd_of": rstd, **_given(weight=weight, mean_of=mean)}
    outputs = {"out": out, **_given(weight_grad=weight_grad, bias_grad=bias_grad)}
    by_number = sets.norm != "batch" and weight is not None
    factor = "" if not by_number else f" * load_weight{'@' if sets.norm == 'layer' else ''}({_WEIGHT_AT[sets.norm]})"
    read = f"const value_t@ g@ = load_grad@(at){factor}; const value_t@ normal@ = (load_self@(at) - mean) * rstd;"
    sums = f"{read} ADD@(grads@, g@) ADD@(products@, g@ * normal@)"
    centre = "TOTAL(grads) / count + " if mean is not None else ""
    formula = f"(g@ - ({centre}normal@ * (TOTAL(products) / count)))" if training else "g@"
    each = "weight_of_set * " if weight is not None and not by_number else ""
    body = f"""
  {team_shared(dialect)}
  {row_start(dialect)}
  const value_t count = (value_t)pieces * length;
  const value_t mean = {"0" if mean is None else "load_mean_of(row)"};
  const value_t rstd = {"1 / sqrt((value_t)load_rstd_of(row) + eps)" if variance else "load_rstd_of(row)"};
  {"const value_t weight_of_set = load_weight(row);" if each else ""}
  SUM(grads); SUM(products); SUM_lanes(grads); SUM_lanes(products);
  {_pieces(dialect, sets.norm, sums, "grads", "products")}
  {team_sum(dialect, "grads")}
  {team_sum(dialect, "products")}
  {"if (member == 0) store_weight_grad(row, TOTAL(products));" if weight_grad is not None else ""}
  {"if (member == 0) store_bias_grad(row, TOTAL(grads));" if bias_grad is not None else ""}
  const value_t scale = {each}rstd;
  {_pieces(dialect, sets.norm, f"{read} store_out@(at, {formula} * scale);")}
"""
    return _launch(f"{sets.norm}_norm_backward", dialect, sets, outputs, inputs, body, {"eps": (value, eps)})


def weight_grads(dialect: Dialect, sets: Sets, wanted: Affine, saved: Saved) -> Launch:
    """Computes the gradients of weight, bias or both for a layer, RMS or group norm."""
    (weight_grad, bias_grad), (grad, self, _, mean, rstd) = wanted, saved
    value = value_dtype(grad.dtype)
    outputs = _given(weight_grad=weight_grad, bias_grad=bias_grad)
    inputs = {"grad": grad, "self": self, "rstd_of": rstd, **_given(mean_of=mean)}
    names = ("products", "grads")[weight_grad is None : 1 + (bias_grad is not None)]
    store = {"products": "store_weight_grad@($at, TOTAL(products@));", "grads": "store_bias_grad@($at, TOTAL(grads@));"}
    zero_mean = "0" if mean is None else "load_mean_of(set)"
    parts = {
        "team_shared": team_shared(dialect),
        "row_start": row_start(dialect),
        "mean": zero_mean,
        "items": str(rows_per_group(dialect)),
        "sum": "ADD@(grads@, load_grad@(at)) "
        "ADD@(products@, load_grad@(at) * ((load_self@(at) - mean) * load_rstd_of(set)))",
    }
    if sets.norm == "layer":
        column = substitute(_COLUMN, parts | {"store": " ".join(store[n].replace("$at", "column") for n in names)})
        body = substitute(
            _COLUMNS, parts | {"by_lanes": column.replace("@", "_lanes"), "singly": column.replace("@", "")}
        )
        items = -(-sets.length // lane_count(dialect, value))
        group_size = int(parts["items"])
        groups = -(-items // group_size)
        integers = sets.integers()
    else:
        parts["loop"] = row_loop(dialect, f"const index_t at = (n * rows + row) * length + i; {parts['sum']}", "length")
        parts["meet"] = " ".join(team_sum(dialect, n) for n in names)
        parts["store"] = " ".join(store[n].replace("$at", "row").replace("@", "") for n in names)
        body = substitute(_CHANNELS, parts)
        channels = sets.pieces * sets.groups
        groups, group_size = row_groups(dialect, channels)
        integers = {
            "rows": channels,
            "pieces": sets.pieces,
            "length": sets.length,
            "groups": sets.groups,
            "batch": sets.count // sets.groups,
        }
    return LaunchSpec(
        f"{sets.norm}_norm_weight_grads",
        dialect,
        outputs=outputs,
        inputs=inputs,
        integers=integers,
        value=value,
        body=body,
        groups=groups,
        group_size=group_size,
        bounded=dialect.target.team_size == 1,
    ).launch()


def _given(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _affine(norm: str, has_weight: bool, has_bias: bool) -> str:
    lanes, at = "@" if norm == "layer" else "", _WEIGHT_AT[norm]
    scaled = f"normal@ * load_weight{lanes}({at})" if has_weight else "normal@"
    return f"{scaled} + load_bias{lanes}({at})" if has_bias else scaled


def _pieces(dialect: Dialect, norm: str, statement: str, *sums: str) -> str:
    """Returns a loop that runs `statement` for every element of the set, at offset `at` and index i in its piece.

    The rounding errors of `sums` are added to the sums after every few pieces. Otherwise they would grow large with
    many pieces, and lose precision themselves.
    """
    settle = " ".join(f"SETTLE({name}) SETTLE_lanes({name})" for name in sums)
    settle = f"if ((piece & 15) == 15 || length > 1024) {{ {settle} }}" if sums else ""
    return f"""for (index_t piece = 0; piece < pieces; ++piece) {{
    const index_t piece_at = {_PIECE_AT[norm]};
    {row_loop(dialect, f"const index_t at = piece_at + i; {statement}", "length")}
    {settle}
  }}"""


def _statistics(dialect: Dialect, norm: str, centred: bool) -> str:
    """Returns statements that compute mean and variance in two passes: elements are in the cache, and nothing cancels.

    The mean is kept in two numbers: if it is thousands of times the deviation, its rounding error is a significant
    part of the deviation.
    """

    def total(name: str, statement: str) -> str:
        return f"""SUM({name}); SUM_lanes({name});
  {_pieces(dialect, norm, statement, name)}
  {team_sum(dialect, name)}"""

    mean = f"""{total("sum", "ADD@(sum@, load_self@(at))")}
  const value_t near_mean = TOTAL(sum) / count, rest = (fma(-near_mean, count, sum) + sum_lost) / count;
  const value_t mean = near_mean + rest, mean_low = rest - (mean - near_mean);"""
    distance = "(load_self@(at) - mean) - mean_low" if centred else "load_self@(at)"
    return f"""{mean if centred else ""}
  {total("squares", f"const value_t@ centred@ = {distance}; ADD@(squares@, centred@ * centred@)")}
  const value_t variance = TOTAL(squares) / count, rstd = 1 / sqrt(variance + eps);
  {"" if centred else "const value_t mean = 0;"}"""


_GIVEN_STATISTICS = """const value_t mean = load_running_mean(row);
  const value_t rstd = 1 / sqrt((value_t)load_running_var(row) + eps);"""

_UPDATE = """if (member == 0) {
    store_running_mean(row, (1 - momentum) * load_running_mean(row) + momentum * mean);
    store_running_var(row, (1 - momentum) * load_running_var(row) + momentum * (TOTAL(squares) / (count - 1)));
  }"""

# The gradients of one column: sums over all sets, each of which has one element in the column.
_COLUMN = """value_t@ grads@ = OF@(0), products@ = OF@(0), grads@_lost = OF@(0), products@_lost = OF@(0);
    for (index_t set = 0; set < rows; ++set) {
      const index_t at = set * length + column;
      const value_t mean = $mean;
      $sum
    }
    $store"""

_COLUMNS = """
  const index_t first = ((index_t)GROUP * $items + ITEM) * LANES;
  if (first >= length) return;
  #define OF_lanes(x) LANES_OF(x)
  #define OF(x) (x)
  if (first + LANES <= length) { const index_t column = first; $by_lanes return; }
  for (index_t column = first; column < length; ++column) { $singly }
"""

_CHANNELS = """
  $team_shared
  $row_start
  SUM(grads); SUM(products); SUM_lanes(grads); SUM_lanes(products);
  for (index_t n = 0; n < batch; ++n) {
    const index_t set = n * groups + row / pieces;
    const value_t mean = $mean;
    $loop
  }
  $meet
  if (member == 0) { $store }
"""


def _launch(
    name: str,
    dialect: Dialect,
    sets: Sets,
    outputs: dict[str, torch.Tensor],
    inputs: dict[str, torch.Tensor],
    body: str,
    numbers: dict[str, tuple[torch.dtype, int | float]],
) -> Launch:
    groups, group_size = row_groups(dialect, sets.count)
    return LaunchSpec(
        name,
        dialect,
        outputs=outputs,
        inputs=inputs,
        integers=sets.integers(),
        numbers=numbers,
        value=value_dtype(outputs["out"].dtype),
        body=body,
        groups=groups,
        group_size=group_size,
        bounded=dialect.target.team_size == 1,
    ).launch()
