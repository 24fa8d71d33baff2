"""Functions related to the error function, and the normal distribution."""

from __future__ import annotations

import math

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.expression import Expression
from torch_backplane.kernels.special import tables
from torch_backplane.kernels.special.series import chebyshev_series, even, polynomial

_INF, _NAN = math.inf, math.nan

# (distribution(x) - 1/2) / x as a ratio of two polynomials in s = x², for |x| <= 5.5; relative error 2e-8. Beyond 5.5,
# float32 has no number between the distribution and 0 or 1.
_NORMAL_ABOVE = (0.3989422738, 0.03345861049, 0.004651464005, 0.0001645707935, 6.301562404e-06, 2.293132404e-08)
_NORMAL_BELOW = (1.0, 0.2505347007, 0.0284159666, 0.001860629235, 7.216604744e-05, 1.199031168e-06)


def _exp_of_square(x: Expression) -> Expression:
    """exp(x²) without the error of rounding x²: the part of x that is a multiple of 1/16 has an exact square."""
    coarse = f.trunc(x * 16.0) / 16.0
    return f.exp(coarse * coarse) * f.exp((x - coarse) * (x + coarse))


def erfcx(x: Expression) -> Expression:
    """exp(x²) erfc(x)."""
    y = f.absolute(x)
    scaled = chebyshev_series(tables.ERFCX, 1.0 - 7.5 / (y + 3.75)) / (1.0 + 2.0 * y)
    return f.where(x < -27.0, _INF, f.where(x < 0.0, 2.0 * _exp_of_square(y) - scaled, scaled))


def _erfcinv_tail(q: Expression) -> Expression:
    """erfcinv(q) for 0 <= q <= 0.29."""
    s = f.sqrt(-f.log(q))
    near = chebyshev_series(tables.ERFCINV_TAIL, (s - 2.05) / 0.95)
    # The table's variable is 3 / s on [0.1, 1].
    far = chebyshev_series(tables.ERFCINV_FAR_TAIL, (3.0 / s - 0.55) / 0.45)
    return s * f.where(s < 3.0, near, far)


def erfinv(y: Expression) -> Expression:
    z = f.absolute(y)
    near = y * chebyshev_series(tables.ERFINV_NEAR, even(0.75, y))
    far = f.copysign(_erfcinv_tail(1.0 - z), y)
    value = f.where(z < 0.75, near, far)
    return f.where(z == 1.0, f.copysign(f.full_like(y, _INF), y), f.where(z < 1.0, value, _NAN))


def ndtri(p: Expression) -> Expression:
    """The inverse of the normal distribution function: the x for which P(X <= x) = p."""
    rest = f.where(p < 0.5, p, 1.0 - p)
    y = 2.0 * p - 1.0
    near = y * chebyshev_series(tables.ERFINV_NEAR, even(0.75, y))
    far = f.copysign(_erfcinv_tail(2.0 * rest), y)
    value = math.sqrt(2.0) * f.where(rest > 0.125, near, far)
    value = f.where((p == 0.0) | (p == 1.0), f.copysign(f.full_like(p, _INF), y), value)
    return f.where((p >= 0.0) & (p <= 1.0), value, _NAN)


def log_ndtr(x: Expression) -> Expression:
    """The logarithm of the normal distribution function."""
    t = x * math.sqrt(0.5)
    return f.where(x < -1.0, f.log(erfcx(-t) * 0.5) - t * t, f.log1p(-0.5 * f.erfc(t)))


def normal_distribution(x: Expression) -> Expression:
    """The normal distribution function, P(X <= x). The absolute error in float32 is at most 2e-7."""
    if x.dtype != torch.float32:
        return 0.5 * (1.0 + f.erf(x * math.sqrt(0.5)))
    s = x * x
    ratio = polynomial(_NORMAL_ABOVE, s) / polynomial(_NORMAL_BELOW, s)
    inside = f.fma(x, ratio, f.full_like(x, 0.5))
    return f.where(x > 5.5, 1.0, f.where(x < -5.5, 0.0, inside))
