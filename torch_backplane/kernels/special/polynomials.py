"""Orthogonal polynomials of degree n, where n is an operand like x (DLMF 18).

The recurrences use fma where compilers contract PyTorch's code to it, so that the results are the same as PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.expression import Expression

_NAN = math.nan


_Step = Callable[[Expression, Expression, Expression, Expression], Expression]


def _recurrence(x: Expression, n: Expression, first: Expression, step: _Step) -> Expression:
    """p[n], where p[0] = 1, p[1] = first and p[k + 1] = step(x, k, p[k], p[k - 1]); 0 for negative n."""
    degree = f.where(f.isfinite(n), n, -1.0).to(torch.int64)

    def more(k: Expression, degree: Expression, x: Expression, last: Expression, before: Expression) -> Expression:
        return (k < degree) & (last == last)

    def body(
        k: Expression, degree: Expression, x: Expression, last: Expression, before: Expression
    ) -> tuple[Expression, ...]:
        return k + 1, degree, x, step(x, k.to(x.dtype), last, before), last

    one = f.full_like(x, 1.0)
    state = (f.full_like(degree, 1), degree, x, first, one)
    _, _, _, value, _ = f.while_loop(more, body, state)
    return f.where(degree < 0, 0.0, f.where(degree == 0, one, value))


def _chebyshev_step(x: Expression, k: Expression, last: Expression, before: Expression) -> Expression:
    return f.fma(2.0 * x, last, -before)


def _chebyshev(
    first: Callable[[Expression], Expression],
    closed: Callable[[Expression, Expression], Expression],
    at_one: tuple[int, int],
    at_minus_one: tuple[int, int],
    steps: int = 8,
) -> Callable[..., Expression]:
    """The Chebyshev polynomials of one kind.

    Args:
        first: the polynomial of degree 1.
        closed: the value at cos(angle).
        at_one: (a, b) of the value a + b n at 1.
        at_minus_one: (a, b) of the value (-1)^n (a + b n) at -1.
        steps: the degree up to which PyTorch uses the recurrence, which is more accurate; the shifted polynomials pass
            another number.
    """

    def value(x: Expression, n: Expression, steps: int = steps) -> Expression:
        degree = f.trunc(n)
        angle = f.acos(x)
        # Where the closed form is used, the recurrence takes no steps instead of n.
        by_angle = (degree > float(steps)) & (f.absolute(x) < 1.0)
        stepped = _recurrence(x, f.where(by_angle | (f.absolute(x) == 1.0), 0.0, n), first(x), _chebyshev_step)
        sign = 1.0 - 2.0 * f.absolute(f.fmod(degree, 2.0))
        edge = f.where(x > 0.0, at_one[0] + at_one[1] * degree, sign * (at_minus_one[0] + at_minus_one[1] * degree))
        inside = f.where(f.absolute(x) == 1.0, edge, f.where(by_angle, closed(angle, degree), stepped))
        return f.where(degree < 0.0, 0.0, inside)

    return value


chebyshev_t = _chebyshev(lambda x: x, lambda angle, n: f.cos(n * angle), (1, 0), (1, 0), steps=6)
chebyshev_u = _chebyshev(lambda x: 2.0 * x, lambda angle, n: f.sin((n + 1.0) * angle) / f.sin(angle), (1, 1), (1, 1))
chebyshev_v = _chebyshev(
    lambda x: 2.0 * x - 1.0, lambda angle, n: f.cos((n + 0.5) * angle) / f.cos(0.5 * angle), (1, 0), (1, 2)
)
chebyshev_w = _chebyshev(
    lambda x: 2.0 * x + 1.0, lambda angle, n: f.sin((n + 0.5) * angle) / f.sin(0.5 * angle), (1, 2), (1, 0)
)


def hermite_h(x: Expression, n: Expression) -> Expression:
    return _within_range(
        n, _recurrence(x, n, 2.0 * x, lambda x, k, last, before: f.fma(2.0 * x, last, -(2.0 * k * before)))
    )


def hermite_he(x: Expression, n: Expression) -> Expression:
    return _within_range(n, _recurrence(x, n, x, lambda x, k, last, before: f.fma(x, last, -(k * before))))


def _within_range(n: Expression, value: Expression) -> Expression:
    """`value`, or NaN from the degree on at which PyTorch considers the range of the dtype insufficient."""
    return f.where(n >= (129.0 if n.dtype == torch.float32 else 513.0), _NAN, value)


def laguerre_l(x: Expression, n: Expression) -> Expression:
    def step(x: Expression, k: Expression, last: Expression, before: Expression) -> Expression:
        return f.fma(2.0 * k + (1.0 - x), last, -(k * before)) / (k + 1.0)

    return _recurrence(x, f.where(x == 0.0, f.minimum(n, 0.0), n), 1.0 - x, step)


def legendre_p(x: Expression, n: Expression) -> Expression:
    def step(x: Expression, k: Expression, last: Expression, before: Expression) -> Expression:
        return f.fma((2.0 * k + 1.0) * x, last, -(k * before)) / (k + 1.0)

    return _recurrence(x, n, x, step)
