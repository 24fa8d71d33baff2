"""Evaluation of Chebyshev series and polynomials, and the variables of the series in tables.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.expression import Expression


def chebyshev_series(coefficients: Sequence[float], t: Expression) -> Expression:
    """c[0] + c[1] T1(t) + …, by Clenshaw's recurrence, without terms that are negligible in t's dtype."""
    smallest = max(map(abs, coefficients)) * (2.0**-28 if t.dtype == torch.float32 else 0.0)
    used = max(n for n, c in enumerate(coefficients) if abs(c) >= smallest)
    last, before = f.full_like(t, 0.0), f.full_like(t, 0.0)
    for c in coefficients[used:0:-1]:
        last, before = c + 2.0 * t * last - before, last
    return coefficients[0] + t * last - before


def polynomial(coefficients: Sequence[float], x: Expression) -> Expression:
    """c[0] + c[1] x + …, by Horner's rule."""
    value = f.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = f.fma(value, x, f.full_like(x, c))
    return value


def far(low: float, x: Expression) -> Expression:
    """The variable of a series on [low, infinity]."""
    return 2.0 * low / x - 1.0


def even(high: float, x: Expression) -> Expression:
    """The variable of the series of an even function on [-high, high]."""
    return 2.0 * (x / high) * (x / high) - 1.0
