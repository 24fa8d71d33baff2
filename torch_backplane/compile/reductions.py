"""Inductor's reductions as states: the state of no element, of one element, and the combination of two."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import facts, integer_range, value_dtype
from torch_backplane.kernels.expression import Expression, Number


class Reduction(NamedTuple):
    """A reduction of scalars.

    Args:
        state: dtypes of the state.
        identity: the state of no element.
        start: the state of one element; takes the element's value or values, and its position (int64).
        combine: takes the numbers of two states, and returns a state.
        results: the numbers of the state that are the results.
    """

    state: tuple[torch.dtype, ...]
    identity: tuple[Number, ...]
    start: Callable[..., Any]
    combine: Callable[..., Any]
    results: tuple[int, ...] = (0,)


def _least(dtype: torch.dtype) -> Number:
    category = facts(dtype).category
    return -math.inf if category == "float" else False if category == "bool" else integer_range(dtype)[0]


def _greatest(dtype: torch.dtype) -> Number:
    category = facts(dtype).category
    return math.inf if category == "float" else True if category == "bool" else integer_range(dtype)[1]


def _sum_dtype(dtype: torch.dtype, wide: bool) -> torch.dtype:
    if facts(dtype).category != "float":
        return torch.int64
    return torch.float64 if wide else value_dtype(dtype)


def accumulated_dtype(dtype: torch.dtype, wide: bool) -> torch.dtype:
    """The dtype in which a scan accumulates elements of `dtype`: float64 for float32 if `wide`."""
    return torch.float64 if wide and dtype == torch.float32 else value_dtype(dtype)


def _simple(
    dtype: torch.dtype, identity: Number, combine: Callable[[Expression, Expression], Expression]
) -> Reduction:
    return Reduction((dtype,), (identity,), lambda a, at: a.to(dtype), combine)


def _position_of_extremum(dtype: torch.dtype, greatest: bool) -> Reduction:
    """The position of the extremum: the first of equal ones. NaN is more extreme than every number."""

    def combine(a: Expression, at_a: Expression, b: Expression, at_b: Expression) -> tuple[Expression, Expression]:
        if a.dtype == torch.bool:
            better = (b & ~a) if greatest else (a & ~b)
            same = ~(a ^ b)
        else:
            better, same = (b > a) if greatest else (b < a), a == b
        if f.is_float(a):
            nan_a, nan_b = f.isnan(a), f.isnan(b)
            better, same = (better & ~nan_a) | (nan_b & ~nan_a), same | (nan_a & nan_b)
        takes_b = better | (same & (at_b < at_a))
        return f.where(takes_b, b, a), f.where(takes_b, at_b, at_a)

    worst = _least(dtype) if greatest else _greatest(dtype)
    last = integer_range(torch.int64)[1]
    return Reduction((dtype, torch.int64), (worst, last), lambda a, at: (a.to(dtype), at), combine, (1,))


def _welford(dtype: torch.dtype, of_states: bool) -> Reduction:
    """Mean, sum of squared deviations, and weight (Chan, Golub and LeVeque 1979)."""

    def combine(
        mean: Expression, m2: Expression, weight: Expression, mean_b: Expression, m2_b: Expression, weight_b: Expression
    ) -> tuple[Expression, ...]:
        difference, total = mean_b - mean, weight + weight_b
        share = f.where(total == 0.0, f.full_like(total, 0.0), weight_b / total)
        return mean + difference * share, m2 + m2_b + difference * difference * weight * share, total

    def start(*values: Expression) -> tuple[Any, ...]:
        if of_states:
            return tuple(one.to(dtype) for one in values[:3])
        a = values[0].to(dtype)
        return a, f.full_like(a, 0.0), f.full_like(a, 1.0)

    return Reduction((dtype,) * 3, (0.0,) * 3, start, combine, (0, 1, 2))


def _online_softmax(dtype: torch.dtype) -> Reduction:
    """The maximum, and the sum of exp(x - maximum) (Milakov and Gimelshein 2018)."""

    def combine(most: Expression, total: Expression, most_b: Expression, total_b: Expression) -> tuple[Expression, ...]:
        greatest = f.maximum(most, most_b)

        def scaled(total: Expression, most: Expression) -> Expression:
            return f.where(most == greatest, total, total * f.exp(most - greatest))

        return greatest, scaled(total, most) + scaled(total_b, most_b)

    def start(*values: Expression) -> tuple[Expression, Expression]:
        a = values[0].to(dtype)
        if len(values) == 3:  # the state of several elements, and the position
            return a, values[1].to(dtype)
        return a, f.where(a == math.inf, f.full_like(a, math.nan), f.full_like(a, 1.0))  # exp(x - maximum)

    return Reduction((dtype, dtype), (-math.inf, 0.0), start, combine, (0, 1))


def reduction(kind: str, dtype: torch.dtype, wide_sums: bool) -> Reduction:
    """The reduction that Inductor calls `kind`, of elements of `dtype`.

    Args:
        wide_sums: whether to accumulate sums of float32 in float64 (`Target.has_wide_sums`).

    Raises:
        NotImplementedError: there is no such reduction.
    """
    value = value_dtype(dtype)
    if kind == "sum":
        return _simple(_sum_dtype(dtype, wide_sums), 0, lambda a, b: a + b)
    if kind == "prod":
        return _simple(_sum_dtype(dtype, wide_sums), 1, lambda a, b: a * b)
    if kind == "xor_sum":
        return _simple(value, False if value == torch.bool else 0, lambda a, b: a ^ b)
    if kind == "any":
        return _simple(torch.bool, False, lambda a, b: a | b)
    if kind == "max":
        return _simple(value, _least(value), f.maximum)
    if kind == "min":
        return _simple(value, _greatest(value), f.minimum)
    if kind in ("argmax", "argmin"):
        return _position_of_extremum(value, kind == "argmax")
    if kind in ("welford_reduce", "welford_combine"):
        return _welford(value, kind == "welford_combine")
    if kind == "online_softmax_reduce":
        return _online_softmax(value)
    raise NotImplementedError(f"kernels have no reduction {kind}")
