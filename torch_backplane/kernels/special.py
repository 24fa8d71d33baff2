"""Special functions as formulas, where no dialect has them: `from torch_backplane.kernels import special`.

Written for float32 and float64. Smooth parts are Chebyshev series (chebyshev_tables.py, which
tools/chebyshev_tables.py computes); around them are the classical identities, named DLMF for NIST's Digital Library of
Mathematical Functions, https://dlmf.nist.gov.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch

from torch_backplane.kernels import chebyshev_tables as tables
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.expression import Expression

_INF, _NAN = math.inf, math.nan


def chebyshev_series(coefficients: Sequence[float], t: Expression) -> Expression:
    """c[0] + c[1] T1(t) + …, by Clenshaw's recurrence, as far as t's dtype can see."""
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
        value = value * x + c
    return value


def _far(low: float, x: Expression) -> Expression:
    return 2.0 * low / x - 1.0


def _even(high: float, x: Expression) -> Expression:
    return 2.0 * (x / high) * (x / high) - 1.0


def _exp_of_square(x: Expression) -> Expression:
    """exp(x²), where x² rounded would lose digits: the part of x that is a multiple of 1/16 has an exact square."""
    coarse = f.trunc(x * 16.0) / 16.0
    return f.exp(coarse * coarse) * f.exp((x - coarse) * (x + coarse))


# Error functions


def erfcx(x: Expression) -> Expression:
    """exp(x²) erfc(x)."""
    y = f.absolute(x)
    scaled = chebyshev_series(tables.ERFCX, 1.0 - 7.5 / (y + 3.75)) / (1.0 + 2.0 * y)
    return f.where(x < -27.0, _INF, f.where(x < 0.0, 2.0 * _exp_of_square(y) - scaled, scaled))


def _erfcinv_tail(q: Expression) -> Expression:
    """erfcinv(q) of 0 <= q <= 0.29."""
    s = f.sqrt(-f.log(q))
    near = chebyshev_series(tables.ERFCINV_TAIL, (s - 2.05) / 0.95)
    # The table's variable is 3 / s on [0.1, 1].
    far = chebyshev_series(tables.ERFCINV_FAR_TAIL, (3.0 / s - 0.55) / 0.45)
    return s * f.where(s < 3.0, near, far)


def erfinv(y: Expression) -> Expression:
    z = f.absolute(y)
    near = y * chebyshev_series(tables.ERFINV_NEAR, _even(0.75, y))
    far = f.copysign(_erfcinv_tail(1.0 - z), y)
    value = f.where(z < 0.75, near, far)
    return f.where(z == 1.0, f.copysign(f.full_like(y, _INF), y), f.where(z < 1.0, value, _NAN))


def ndtri(p: Expression) -> Expression:
    """The x below which a normally distributed number is with probability p."""
    rest = f.where(p < 0.5, p, 1.0 - p)
    y = 2.0 * p - 1.0
    near = y * chebyshev_series(tables.ERFINV_NEAR, _even(0.75, y))
    far = f.copysign(_erfcinv_tail(2.0 * rest), y)
    value = math.sqrt(2.0) * f.where(rest > 0.125, near, far)
    value = f.where((p == 0.0) | (p == 1.0), f.copysign(f.full_like(p, _INF), y), value)
    return f.where((p >= 0.0) & (p <= 1.0), value, _NAN)


def log_ndtr(x: Expression) -> Expression:
    """The logarithm of the probability that a normally distributed number is below x."""
    t = x * math.sqrt(0.5)
    return f.where(x < -1.0, f.log(erfcx(-t) * 0.5) - t * t, f.log1p(-0.5 * f.erfc(t)))


# Gamma and zeta functions


def _bernoulli(count: int) -> list[Fraction]:
    """B2, B4, …, by the recurrence sum(binomial(m + 1, k) B[k]) = 0."""
    numbers = [Fraction(1)]
    for m in range(1, 2 * count + 1):
        numbers.append(-sum((math.comb(m + 1, k) * numbers[k] for k in range(m)), Fraction(0)) / (m + 1))
    return numbers[2::2]


_BERNOULLI = _bernoulli(12)


def digamma(x: Expression) -> Expression:
    """The recurrence up to 10 (DLMF 5.5.2), the asymptotic series (5.11.2), and reflection for x < 0 (5.5.4)."""
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
    """Hurwitz' zeta function, the sum of (q + k)^-s, by Euler and Maclaurin's formula (DLMF 25.11.5).

    For q below zero it is what the sum is, which needs a whole s.
    """

    def more(a: Expression, total: Expression, s: Expression, count: Expression) -> Expression:
        return (count < 9.0) | (a <= 9.0)

    def add(a: Expression, total: Expression, s: Expression, count: Expression) -> tuple[Expression, ...]:
        return a + 1.0, total + f.power(a + 1.0, -s), s, count + 1.0

    # A sum from far below would take forever.
    start = f.where(q > -1e6, q, 1.0)
    a, total, _, _ = f.while_loop(more, add, (start, f.power(start, -s), s, f.full_like(q, 0.0)))
    power = f.power(a, -s)
    value = total + power * a / (s - 1.0) - 0.5 * power
    term = power * s / a
    for k, b in enumerate(_BERNOULLI):
        value = value + float(b / math.factorial(2 * k + 2)) * term
        term = term * ((s + (2.0 * k + 1.0)) / a) * ((s + (2.0 * k + 2.0)) / a)
    value = f.where(q <= -1e6, _NAN, value)
    pole = f.where(q == f.floor(q), _INF, f.where(s == f.floor(s), value, _NAN))
    value = f.where(q <= 0.0, pole, value)
    value = f.where(f.isnan(q), q, value)
    return f.where(s == 1.0, _INF, f.where(s < 1.0, _NAN, value))


def trigamma(x: Expression) -> Expression:
    """zeta(2, x), and reflection for x < 0.5 (DLMF 5.15.6)."""
    reflect = x < 0.5
    y = f.where(reflect, 1.0 - x, x)
    value = zeta(f.full_like(x, 2.0), y)
    sine = f.sin(math.pi * (x - f.round(x)))
    value = f.where(reflect, math.pi**2 / (sine * sine) - value, value)
    return f.where(x == _INF, 0.0, value)


def polygamma(n: int, x: Expression) -> Expression:
    """The n-th derivative of digamma (DLMF 25.11.12)."""
    if n == 0:
        return digamma(x)
    if n == 1:
        return trigamma(x)
    try:
        factorial = float(math.factorial(n))
    except OverflowError:
        factorial = _INF
    return (factorial if n % 2 else -factorial) * zeta(f.full_like(x, n + 1.0), x)


def mvlgamma(x: Expression, p: int) -> Expression:
    """The logarithm of the gamma function of p dimensions."""
    value = f.full_like(x, p * (p - 1) / 4.0 * math.log(math.pi))
    for j in range(p):
        value = value + f.lgamma(x - 0.5 * j)
    return value


# Bessel functions (DLMF 10)


def i0e(x: Expression) -> Expression:
    y = f.absolute(x)
    near = chebyshev_series(tables.I0E_NEAR, y / 4.0 - 1.0)
    return f.where(y <= 8.0, near, chebyshev_series(tables.I0E_FAR, _far(8.0, y)) / f.sqrt(y))


def i1e(x: Expression) -> Expression:
    y = f.absolute(x)
    near = chebyshev_series(tables.I1E_NEAR, y / 4.0 - 1.0) * y
    value = f.where(y <= 8.0, near, chebyshev_series(tables.I1E_FAR, _far(8.0, y)) / f.sqrt(y))
    return f.where(x < 0.0, -value, value)


def i0(x: Expression) -> Expression:
    return f.exp(f.absolute(x)) * i0e(x)


def i1(x: Expression) -> Expression:
    return f.exp(f.absolute(x)) * i1e(x)


def _of_positive(x: Expression, value: Expression, at_zero: float) -> Expression:
    return f.where(x == 0.0, at_zero, f.where(x < 0.0, _NAN, value))


def _k0_near(x: Expression) -> Expression:
    return chebyshev_series(tables.K0_NEAR, _even(2.0, x)) - f.log(0.5 * x) * i0(x)


def _k1_near(x: Expression) -> Expression:
    return chebyshev_series(tables.K1_NEAR, _even(2.0, x)) / x + f.log(0.5 * x) * i1(x)


def _k_far(table: Sequence[float], x: Expression) -> Expression:
    """Times exp(x)."""
    return chebyshev_series(table, _far(2.0, x)) / f.sqrt(x)


def k0(x: Expression) -> Expression:
    return _of_positive(x, f.where(x <= 2.0, _k0_near(x), f.exp(-x) * _k_far(tables.K0E_FAR, x)), _INF)


def k1(x: Expression) -> Expression:
    return _of_positive(x, f.where(x <= 2.0, _k1_near(x), f.exp(-x) * _k_far(tables.K1E_FAR, x)), _INF)


def k0e(x: Expression) -> Expression:
    return _of_positive(x, f.where(x <= 2.0, _k0_near(x) * f.exp(x), _k_far(tables.K0E_FAR, x)), _INF)


def k1e(x: Expression) -> Expression:
    return _of_positive(x, f.where(x <= 2.0, _k1_near(x) * f.exp(x), _k_far(tables.K1E_FAR, x)), _INF)


def _hankel(p: Sequence[float], q: Sequence[float], x: Expression) -> tuple[Expression, Expression]:
    """P and Q of J = sqrt(2 / (pi x)) (P cos(c) - Q sin(c)) and Y = … (P sin(c) + Q cos(c)), DLMF 10.17."""
    t = 2.0 * (8.0 / x) * (8.0 / x) - 1.0
    return chebyshev_series(p, t), chebyshev_series(q, t) / x


def _wave(order: int, x: Expression) -> tuple[Expression, Expression]:
    """J and Y of x >= 8. Of c = x - (2 order + 1) pi / 4, only x's own sine and cosine are taken: no digit is lost."""
    sine, cosine = f.sin(x), f.cos(x)
    if order == 0:
        p, q = _hankel(tables.HANKEL0_P, tables.HANKEL0_Q, x)
        cos_c, sin_c = cosine + sine, sine - cosine
    else:
        p, q = _hankel(tables.HANKEL1_P, tables.HANKEL1_Q, x)
        cos_c, sin_c = sine - cosine, -(sine + cosine)
    scale = 1.0 / f.sqrt(math.pi * x)
    return scale * (p * cos_c - q * sin_c), scale * (p * sin_c + q * cos_c)


def j0(x: Expression) -> Expression:
    y = f.absolute(x)
    return f.where(y <= 8.0, chebyshev_series(tables.J0_NEAR, _even(8.0, y)), _wave(0, y)[0])


def j1(x: Expression) -> Expression:
    y = f.absolute(x)
    far = _wave(1, y)[0]
    return f.where(y <= 8.0, chebyshev_series(tables.J1_NEAR, _even(8.0, y)) * x, f.where(x < 0.0, -far, far))


def y0(x: Expression) -> Expression:
    near = chebyshev_series(tables.Y0_NEAR, _even(8.0, x)) + 2.0 / math.pi * f.log(x) * j0(x)
    return _of_positive(x, f.where(x <= 8.0, near, _wave(0, x)[1]), -_INF)


def y1(x: Expression) -> Expression:
    near = chebyshev_series(tables.Y1_NEAR, _even(8.0, x)) * x + 2.0 / math.pi * (f.log(x) * j1(x) - 1.0 / x)
    return _of_positive(x, f.where(x <= 8.0, near, _wave(1, x)[1]), -_INF)


def spherical_j0(x: Expression) -> Expression:
    """sin(x) / x."""
    square = x * x
    near = polynomial([(-1.0) ** k / math.factorial(2 * k + 1) for k in range(7)], square)
    return f.where(f.absolute(x) < 0.5, near, f.where(f.isinf(x), 0.0, f.sin(x) / x))


def airy_ai(x: Expression) -> Expression:
    """DLMF 9.7: decaying to the right, a wave to the left."""
    y = f.absolute(x)
    argument = 2.0 / 3.0 * y * f.sqrt(y)
    root = f.sqrt(f.sqrt(y))
    near = chebyshev_series(tables.AIRY_NEAR, (x + 1.0) / 3.0)
    decay = chebyshev_series(tables.AIRY_DECAY, _far(2.0 / 3.0 * 2.0**1.5, argument)) * f.exp(-argument) / root
    ratio = 2.0 / 3.0 * 4.0**1.5 / argument
    t = 2.0 * ratio * ratio - 1.0
    sine, cosine = f.sin(argument), f.cos(argument)
    wave_f, wave_g = chebyshev_series(tables.AIRY_WAVE_F, t), chebyshev_series(tables.AIRY_WAVE_G, t) / argument
    wave = ((sine + cosine) * wave_f - (cosine - sine) * wave_g) / (math.sqrt(2.0 * math.pi) * root)
    value = f.where(x > 2.0, decay, f.where(x < -4.0, wave, near))
    return f.where(x == _INF, _NAN, value)  # as PyTorch; the limit is zero


# Orthogonal polynomials of degree n, which is a number like x (DLMF 18)

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
    return 2.0 * x * last - before


def _chebyshev(
    first: Callable[[Expression], Expression],
    closed: Callable[[Expression, Expression], Expression],
    at_one: tuple[int, int],
    at_minus_one: tuple[int, int],
) -> Callable[[Expression, Expression], Expression]:
    """Of one kind. `closed` is the value at cos(angle); at 1 and -1 it is a + b n, at -1 with the sign of (-1)^n."""

    def value(x: Expression, n: Expression) -> Expression:
        degree = f.trunc(n)
        angle = f.acos(x)
        # The recurrence would take n steps; where there is a closed form it takes none.
        by_angle = (degree > 6.0) & (f.absolute(x) < 1.0)
        stepped = _recurrence(x, f.where(by_angle | (f.absolute(x) == 1.0), 0.0, n), first(x), _chebyshev_step)
        sign = 1.0 - 2.0 * f.absolute(f.fmod(degree, 2.0))
        edge = f.where(x > 0.0, at_one[0] + at_one[1] * degree, sign * (at_minus_one[0] + at_minus_one[1] * degree))
        inside = f.where(f.absolute(x) == 1.0, edge, f.where(by_angle, closed(angle, degree), stepped))
        return f.where(degree < 0.0, 0.0, inside)

    return value


chebyshev_t = _chebyshev(lambda x: x, lambda angle, n: f.cos(n * angle), (1, 0), (1, 0))
chebyshev_u = _chebyshev(lambda x: 2.0 * x, lambda angle, n: f.sin((n + 1.0) * angle) / f.sin(angle), (1, 1), (1, 1))
chebyshev_v = _chebyshev(
    lambda x: 2.0 * x - 1.0, lambda angle, n: f.cos((n + 0.5) * angle) / f.cos(0.5 * angle), (1, 0), (1, 2)
)
chebyshev_w = _chebyshev(
    lambda x: 2.0 * x + 1.0, lambda angle, n: f.sin((n + 0.5) * angle) / f.sin(0.5 * angle), (1, 2), (1, 0)
)


def hermite_h(x: Expression, n: Expression) -> Expression:
    return _within_range(n, _recurrence(x, n, 2.0 * x, lambda x, k, last, before: 2.0 * x * last - 2.0 * k * before))


def hermite_he(x: Expression, n: Expression) -> Expression:
    return _within_range(n, _recurrence(x, n, x, lambda x, k, last, before: x * last - k * before))


def _within_range(n: Expression, value: Expression) -> Expression:
    """PyTorch gives NaN from the degree on at which numbers of the dtype do not suffice."""
    return f.where(n >= (129.0 if n.dtype == torch.float32 else 513.0), _NAN, value)


def laguerre_l(x: Expression, n: Expression) -> Expression:
    def step(x: Expression, k: Expression, last: Expression, before: Expression) -> Expression:
        return ((2.0 * k + (1.0 - x)) * last - k * before) / (k + 1.0)

    return _recurrence(x, f.where(x == 0.0, f.minimum(n, 0.0), n), 1.0 - x, step)


def legendre_p(x: Expression, n: Expression) -> Expression:
    def step(x: Expression, k: Expression, last: Expression, before: Expression) -> Expression:
        return ((2.0 * k + 1.0) * x * last - k * before) / (k + 1.0)

    return _recurrence(x, n, x, step)
