"""Bessel and Airy functions (DLMF 9 and 10)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.expression import Expression
from torch_backplane.kernels.special import tables
from torch_backplane.kernels.special.series import chebyshev_series, even, far, polynomial

_INF, _NAN = math.inf, math.nan


def i0e(x: Expression) -> Expression:
    y = f.absolute(x)
    near = chebyshev_series(tables.I0E_NEAR, y / 4.0 - 1.0)
    return f.where(y <= 8.0, near, chebyshev_series(tables.I0E_FAR, far(8.0, y)) / f.sqrt(y))


def i1e(x: Expression) -> Expression:
    y = f.absolute(x)
    near = chebyshev_series(tables.I1E_NEAR, y / 4.0 - 1.0) * y
    value = f.where(y <= 8.0, near, chebyshev_series(tables.I1E_FAR, far(8.0, y)) / f.sqrt(y))
    return f.where(x < 0.0, -value, value)


def i0(x: Expression) -> Expression:
    return f.exp(f.absolute(x)) * i0e(x)


def i1(x: Expression) -> Expression:
    return f.exp(f.absolute(x)) * i1e(x)


def _of_positive(x: Expression, value: Expression, at_zero: float) -> Expression:
    return f.where(x == 0.0, at_zero, f.where(x < 0.0, _NAN, value))


def _k0_near(x: Expression) -> Expression:
    return chebyshev_series(tables.K0_NEAR, even(2.0, x)) - f.log(0.5 * x) * i0(x)


def _k1_near(x: Expression) -> Expression:
    return chebyshev_series(tables.K1_NEAR, even(2.0, x)) / x + f.log(0.5 * x) * i1(x)


def _k_far(table: Sequence[float], x: Expression) -> Expression:
    """exp(x) K(x) for x >= 2."""
    return chebyshev_series(table, far(2.0, x)) / f.sqrt(x)


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
    """J and Y for x >= 8.

    The sine and cosine of c = x - (2 order + 1) pi / 4 are computed from those of x, so that no digits are lost.
    """
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
    return f.where(y <= 8.0, chebyshev_series(tables.J0_NEAR, even(8.0, y)), _wave(0, y)[0])


def j1(x: Expression) -> Expression:
    y = f.absolute(x)
    far = _wave(1, y)[0]
    return f.where(y <= 8.0, chebyshev_series(tables.J1_NEAR, even(8.0, y)) * x, f.where(x < 0.0, -far, far))


def y0(x: Expression) -> Expression:
    near = chebyshev_series(tables.Y0_NEAR, even(8.0, x)) + 2.0 / math.pi * f.log(x) * j0(x)
    return _of_positive(x, f.where(x <= 8.0, near, _wave(0, x)[1]), -_INF)


def y1(x: Expression) -> Expression:
    near = chebyshev_series(tables.Y1_NEAR, even(8.0, x)) * x + 2.0 / math.pi * (f.log(x) * j1(x) - 1.0 / x)
    return _of_positive(x, f.where(x <= 8.0, near, _wave(1, x)[1]), -_INF)


def spherical_j0(x: Expression) -> Expression:
    """sin(x) / x."""
    square = x * x
    near = polynomial([(-1.0) ** k / math.factorial(2 * k + 1) for k in range(7)], square)
    return f.where(f.absolute(x) < 0.5, near, f.where(f.isinf(x), 0.0, f.sin(x) / x))


def airy_ai(x: Expression) -> Expression:
    """The Airy function Ai (DLMF 9.7), which decays to the right and oscillates to the left."""
    y = f.absolute(x)
    argument = 2.0 / 3.0 * y * f.sqrt(y)
    root = f.sqrt(f.sqrt(y))
    near = chebyshev_series(tables.AIRY_NEAR, (x + 1.0) / 3.0)
    decay = chebyshev_series(tables.AIRY_DECAY, far(2.0 / 3.0 * 2.0**1.5, argument)) * f.exp(-argument) / root
    ratio = 2.0 / 3.0 * 4.0**1.5 / argument
    t = 2.0 * ratio * ratio - 1.0
    sine, cosine = f.sin(argument), f.cos(argument)
    wave_f, wave_g = chebyshev_series(tables.AIRY_WAVE_F, t), chebyshev_series(tables.AIRY_WAVE_G, t) / argument
    wave = ((sine + cosine) * wave_f - (cosine - sine) * wave_g) / (math.sqrt(2.0 * math.pi) * root)
    value = f.where(x > 2.0, decay, f.where(x < -4.0, wave, near))
    return f.where(x == _INF, _NAN, value)  # as in PyTorch, although the limit is zero
