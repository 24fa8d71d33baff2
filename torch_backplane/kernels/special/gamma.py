"""Gamma and zeta functions (DLMF 5, 8 and 25)."""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.expression import Expression
from torch_backplane.kernels.special.series import polynomial

_INF, _NAN = math.inf, math.nan


def _bernoulli(count: int) -> list[Fraction]:
    """B2, B4, …, by the recurrence sum(binomial(m + 1, k) B[k]) = 0."""
    numbers = [Fraction(1)]
    for m in range(1, 2 * count + 1):
        numbers.append(-sum((math.comb(m + 1, k) * numbers[k] for k in range(m)), Fraction(0)) / (m + 1))
    return numbers[2::2]


_BERNOULLI = _bernoulli(12)


def digamma(x: Expression) -> Expression:
    """Uses the recurrence up to 10 (DLMF 5.5.2), the asymptotic series (5.11.2), and reflection for x < 0 (5.5.4)."""
    negative = x < 0.0
    start = f.where(negative, 1.0 - x, x)
    y, below = f.while_loop(lambda y, s: y < 10.0, lambda y, s: (y + 1.0, s - 1.0 / y), (start, f.full_like(x, 0.0)))
    series = [float(b / (2 * (k + 1))) for k, b in enumerate(_BERNOULLI[:7])]
    z = 1.0 / (y * y)
    value = below + f.log(y) - 0.5 / y - z * polynomial(series, z)
    fraction = x - f.round(x)
    reflected = value - math.pi / f.tan(math.pi * fraction)
    value = f.where(negative, f.where(fraction == 0.0, _NAN, reflected), value)
    return f.where(x == 0.0, f.copysign(f.full_like(x, _INF), -x), value)


def zeta(s: Expression, q: Expression) -> Expression:
    """Hurwitz' zeta function, the sum of (q + k)^-s, by the Euler-Maclaurin formula (DLMF 25.11.5).

    For q < 0 it is the value of that sum, which requires an integer s.
    """

    def more(a: Expression, total: Expression, s: Expression, count: Expression) -> Expression:
        return (count < 9.0) | (a <= 9.0)

    def add(a: Expression, total: Expression, s: Expression, count: Expression) -> tuple[Expression, ...]:
        return a + 1.0, total + f.power(a + 1.0, -s), s, count + 1.0

    # A sum from a large negative q would take too long.
    start = f.where(q > -1e6, q, 1.0)
    a, total, _, _ = f.while_loop(more, add, (start, f.power(start, -s), s, f.full_like(q, 0.0)))
    rest = f.power(a, 1.0 - s)  # can be above 0 where a^-s underflows
    power = rest / a
    value = total + rest / (s - 1.0) - 0.5 * power
    term = power * s / a
    for k, b in enumerate(_BERNOULLI):
        value = value + float(b / math.factorial(2 * k + 2)) * term
        term = term * ((s + (2.0 * k + 1.0)) / a) * ((s + (2.0 * k + 2.0)) / a)
    value = f.where(rest == 0.0, total, value)  # avoids 0 times an infinite s
    value = f.where(q == _INF, _NAN, value)  # as in PyTorch
    value = f.where(q <= -1e6, _NAN, value)
    pole = f.where(q == f.floor(q), _INF, f.where(s == f.floor(s), value, _NAN))
    value = f.where(q <= 0.0, pole, value)
    value = f.where(f.isnan(q), q, value)
    return f.where(s == 1.0, _INF, f.where(s < 1.0, _NAN, value))


def trigamma(x: Expression) -> Expression:
    """zeta(2, x), with reflection for x < 0.5 (DLMF 5.15.6)."""
    reflect = x < 0.5
    y = f.where(reflect, 1.0 - x, x)
    value = zeta(f.full_like(x, 2.0), y)
    sine = f.sin(math.pi * (x - f.round(x)))
    value = f.where(reflect, math.pi**2 / (sine * sine) - value, value)
    return f.where(x == _INF, 0.0, value)


def polygamma_factor(n: int) -> float:
    """The factor by which zeta(n + 1, x) is the n-th derivative of digamma, for n >= 1 (DLMF 25.11.12)."""
    factorial = float(math.factorial(n)) if n <= 170 else _INF
    return factorial if n % 2 else -factorial


def mvlgamma_constant(p: int) -> float:
    """The term of `mvlgamma` that depends on p only."""
    return p * (p - 1) / 4.0 * math.log(math.pi)


def mvlgamma(x: Expression, p: Expression, constant: Expression) -> Expression:
    """The logarithm of the p-dimensional gamma function; `constant` is `mvlgamma_constant(p)`."""

    def add(value: Expression, j: Expression, x: Expression, last: Expression) -> tuple[Expression, ...]:
        return value + f.lgamma(x - 0.5 * j.to(x.dtype)), j + 1, x, last

    # Counts in integers, whatever the dtype of p.
    last = p.to(torch.int64)
    value, *_ = f.while_loop(lambda value, j, x, last: j < last, add, (constant, f.full_like(last, 0), x, last))
    return value


# Incomplete gamma functions. The series needs about sqrt(a) terms where x is near a, and far fewer elsewhere.

_MAX_TERMS = 1 << 16
_LARGE = 1e4
# Coefficients of Temme's expansion (DLMF 8.12.12): a row for each power of 1/a, by powers of eta.
_TEMME = (
    (-1 / 3, 1 / 12, -2 / 135, 1 / 864, 1 / 2835, -139 / 777600, 1 / 25515),
    (-1 / 540, -1 / 288, 1 / 378, -77 / 77760),
    (25 / 6048, -139 / 51840),
)


def _density(a: Expression, x: Expression) -> Expression:
    """x^a exp(-x) / gamma(a + 1). Uses Stirling's series (DLMF 5.11.1) for large a, where logarithms would cancel."""
    small = f.exp(a * f.log(x) - x - f.lgamma(a + 1.0))
    distance = (x - a) / a
    series = [float(b / ((2 * k + 1) * (2 * k + 2))) for k, b in enumerate(_BERNOULLI[:6])]
    stirling = polynomial(series, 1.0 / (a * a)) / a
    large = f.exp(a * (f.log1p(distance) - distance) - stirling) / f.sqrt(2.0 * math.pi * a)
    return f.where(a < 10.0, small, large)


def _by_sum(a: Expression, x: Expression, used: Expression) -> Expression:
    """The lower function by its series (DLMF 8.11.4), where `used` holds."""
    tiny = torch.finfo(x.dtype).eps

    def more(term: Expression, total: Expression, a: Expression, x: Expression) -> Expression:
        return term > tiny * total

    def add(term: Expression, total: Expression, a: Expression, x: Expression) -> tuple[Expression, ...]:
        term = term * x / (a + 1.0)
        return term, total + term, a + 1.0, x

    one = f.full_like(x, 1.0)
    _, total, _, _ = f.while_loop(more, add, (f.where(used, one, 0.0), one, a, x))
    return _density(a, x) * total


def _by_fraction(a: Expression, x: Expression, used: Expression) -> Expression:
    """The upper function by its continued fraction (DLMF 8.9.2, evaluated by Lentz' method), where `used` holds."""
    tiny = torch.finfo(x.dtype).eps
    small = 1e-30

    def more(count: Expression, change: Expression, *_: Expression) -> Expression:
        return (f.absolute(change - 1.0) > tiny) & (count < _MAX_TERMS)

    def step(
        count: Expression, change: Expression, a: Expression, b: Expression, c: Expression, d: Expression, h: Expression
    ) -> tuple[Expression, ...]:
        numerator = -count * (count - a)
        d = numerator * d + b + 2.0
        d = 1.0 / f.where(f.absolute(d) < small, small, d)
        c = b + 2.0 + numerator / c
        c = f.where(f.absolute(c) < small, small, c)
        return count + 1.0, c * d, a, b + 2.0, c, d, h * (c * d)

    first = x + 1.0 - a
    first = f.where(f.absolute(first) < small, small, first)
    change = f.where(used, f.full_like(x, 2.0), 1.0)
    state = (f.full_like(x, 1.0), change, a, x + 1.0 - a, f.full_like(x, 1.0 / small), 1.0 / first, 1.0 / first)
    *_, h = f.while_loop(more, step, state)
    return _density(a, x) * a * h


def _by_normal_distribution(a: Expression, x: Expression, lower: bool) -> Expression:
    """Temme's uniform expansion for large a (DLMF 8.12.3 to 8.12.10). Its coefficients are series around x = a.

    Far from x = a the function is 0 or 1 for such an a, and so is the complementary error function.
    """
    distance = (x - a) / a
    # sqrt(2 (distance - log(1 + distance))), by a series where the difference would cancel.
    near = distance * f.sqrt(2.0 * polynomial([(-1.0) ** k / (k + 2.0) for k in range(16)], distance))
    far = f.copysign(f.sqrt(2.0 * (distance - f.log1p(distance))), distance)
    eta = f.where(f.absolute(distance) < 0.1, near, far)
    close = f.maximum(f.minimum(eta, 1.0), -1.0)  # beyond 1, the factor exp(-exponent²) is 0
    rest = polynomial(_TEMME[-1], close)
    for coefficients in reversed(_TEMME[:-1]):
        rest = polynomial(coefficients, close) + rest / a
    exponent = f.sqrt(0.5 * a) * eta
    rest = rest * f.exp(-exponent * exponent) / (f.sqrt(a) * math.sqrt(2.0 * math.pi))
    return 0.5 * f.erfc(-exponent if lower else exponent) + (-rest if lower else rest)


def _incomplete(a: Expression, x: Expression, lower: bool) -> Expression:
    is_large = a > _LARGE
    regular = (a > 0.0) & (x > 0.0) & ~is_large & (x < _INF)
    by_sum = x < a + 1.0
    summed = _by_sum(a, x, regular & by_sum)
    fraction = _by_fraction(a, x, regular & ~by_sum)
    value = f.where(by_sum, summed, 1.0 - fraction) if lower else f.where(by_sum, 1.0 - summed, fraction)
    value = f.where(is_large, _by_normal_distribution(a, x, lower), value)
    none, all_ = (0.0, 1.0) if lower else (1.0, 0.0)
    value = f.where((x == 0.0) | (a == _INF), none, value)
    value = f.where((a == 0.0) | ((x == _INF) & (a != _INF)), all_, value)
    invalid = (a < 0.0) | (x < 0.0) | ((a == 0.0) & ~(x > 0.0)) | ((a == _INF) & (x == _INF))
    return f.where(invalid, _NAN, value)


def gammainc(a: Expression, x: Expression) -> Expression:
    """The regularized lower incomplete gamma function."""
    return _incomplete(a, x, True)


def gammaincc(a: Expression, x: Expression) -> Expression:
    """The regularized upper incomplete gamma function."""
    return _incomplete(a, x, False)
