"""Complex functions as pairs of real formulas, which operations on complex64 and complex128 are lowered to.

The reference is PyTorch on the CPU, whose functions are the C library's: branch cuts, signed zeros and special values
are those of C99, Annex G, except where a docstring says otherwise. The methods are from

- W. Kahan, "Branch cuts for complex elementary functions, or much ado about nothing's sign bit", 1987;
- R. L. Smith, "Algorithm 116: complex division", 1962; M. Baudin, R. L. Smith, "A robust complex division in Scilab",
  2012, for scaling around it;
- T. E. Hull, T. F. Fairgrieve, P. T. P. Tang, "Implementing the complex arcsine and arccosine functions using exception
  handling", 1997.

Errors are small relative to the complex result. A part that is much smaller than the other can have fewer correct
digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.expression import Expression

_INF, _NAN = math.inf, math.nan


class Parts(NamedTuple):
    """A complex value. Both parts have the same dtype, float32 or float64."""

    real: Expression
    imaginary: Expression


class _Range(NamedTuple):
    """Limits of a dtype that the formulas below rely on. The scales are even powers of two."""

    high: float  # squares of numbers up to it do not overflow
    down: float  # the scale for larger numbers
    low: float  # squares of numbers from it on do not underflow
    up: float  # the scale for smaller numbers
    step: float  # exp(step + 8) is finite
    far: float  # for |z| from it on, 1 + z² is z² to all digits
    log_of_2: tuple[float, float]  # rounded, and the rest


_LOG_OF_2_32 = (float.fromhex("0x1.62e43p-1"), -1.904654299957768e-09)
_FLOAT32 = _Range(2.0**62, 2.0**-66, 2.0**-59, 2.0**90, 80.0, 2.0**14, _LOG_OF_2_32)
_FLOAT64 = _Range(2.0**510, 2.0**-520, 2.0**-500, 2.0**600, 700.0, 2.0**30, (math.log(2.0), 2.3190468138462996e-17))


def _range(x: Expression) -> _Range:
    return _FLOAT32 if x.dtype == torch.float32 else _FLOAT64


def _times_i(a: Parts) -> Parts:
    return Parts(-a.imaginary, a.real)


def _over_i(a: Parts) -> Parts:
    return Parts(a.imaginary, -a.real)


def _select(condition: Expression, a: Parts, b: Parts) -> Parts:
    return Parts(f.where(condition, a.real, b.real), f.where(condition, a.imaginary, b.imaginary))


def _times(a: Parts, factor: Expression | float) -> Parts:
    return Parts(a.real * factor, a.imaginary * factor)


def _is_infinite(a: Parts) -> Expression:
    return f.isinf(a.real) | f.isinf(a.imaginary)


def _ordered(x: Expression, y: Expression) -> tuple[Expression, Expression]:
    """The larger and the smaller value. The order is arbitrary if one is NaN, which is cheaper than `maximum`."""
    swap = x < y
    return f.where(swap, y, x), f.where(swap, x, y)


def _scale(a: Parts) -> Expression:
    """A scale for a, mostly 1: the squares of the scaled parts do not overflow, and do not both underflow."""
    limits = _range(a.real)
    largest, _ = _ordered(f.absolute(a.real), f.absolute(a.imaginary))
    one = f.full_like(largest, 1.0)
    return f.where(largest > limits.high, limits.down, f.where(largest < limits.low, limits.up, one))


def _by_scale(scale: Expression, down: float, up: float, neither: float) -> Expression:
    """`down`, `up` or `neither`, depending on the scale that `_scale` returned."""
    limits = _range(scale)
    return f.where(scale == limits.down, down, f.where(scale == limits.up, up, f.full_like(scale, neither)))


# Arithmetic


def multiply(a: Parts, b: Parts) -> Parts:
    """As in PyTorch, and unlike C99, infinities are not recovered from NaN parts."""
    return Parts(
        a.real * b.real - a.imaginary * b.imaginary,
        a.real * b.imaginary + a.imaginary * b.real,
    )


def _smith(n: Parts, d: Parts) -> Parts:
    """n / d, where the square of d is in range. If d's imaginary part is larger, both are divided by i first."""
    swap = ~(f.absolute(d.real) >= f.absolute(d.imaginary))
    n, d = _select(swap, _over_i(n), n), _select(swap, _over_i(d), d)
    ratio = d.imaginary / d.real
    size = d.real + d.imaginary * ratio
    return Parts((n.real + n.imaginary * ratio) / size, (n.imaginary - n.real * ratio) / size)


def divide(a: Parts, b: Parts) -> Parts:
    """Smith's algorithm on operands that are scaled to the middle of the range.

    Non-finite parts and division by zero, whose sign is ignored, behave as in PyTorch; C99 distinguishes more cases.
    """
    scale_a, scale_b = _scale(a), _scale(b)
    quotient = _smith(_times(a, scale_a), _times(b, scale_b))
    # Undo the two scales one after the other, unless they cancel.
    limits, cancel, one = _range(scale_a), scale_a == scale_b, f.full_like(scale_a, 1.0)
    unscale = _by_scale(scale_a, 1.0 / limits.down, 1.0 / limits.up, 1.0)
    quotient = _times(_times(quotient, f.where(cancel, one, scale_b)), f.where(cancel, one, unscale))
    by_zero = (b.real == 0.0) & (b.imaginary == 0.0)
    return _select(by_zero, Parts(a.real / f.absolute(b.real), a.imaginary / f.absolute(b.imaginary)), quotient)


def reciprocal(a: Parts) -> Parts:
    """1 / a; infinity and NaN for zero, as in PyTorch."""
    return divide(_one(a), a)


def _one(a: Parts) -> Parts:
    return Parts(f.full_like(a.real, 1.0), f.full_like(a.real, 0.0))


class _Size(NamedTuple):
    """The squared magnitude of a scaled number, which is square + lost, and the scale."""

    square: Expression
    lost: Expression
    scale: Expression

    def root(self) -> Expression:
        """The magnitude, refined by a Newton step. OpenCL's hypot is ten times slower on CPUs."""
        root = f.sqrt(self.square)
        better = root + 0.5 * (f.fma(-root, root, self.square) + self.lost) / root
        return f.where(self.square == 0.0, 0.0, better)


def _size(a: Parts) -> _Size:
    # Order first, then scale: CPU compilers vectorize this, but not the reverse.
    scale = _scale(a)
    large, small = _ordered(f.absolute(a.real), f.absolute(a.imaginary))
    large, small = large * scale, small * scale
    first, second = large * large, small * small
    square = first + second
    return _Size(square, (first - square) + second + f.fma(large, large, -first), scale)


def absolute(a: Parts) -> Expression:
    size, limits = _size(a), _range(a.real)
    value = size.root() * _by_scale(size.scale, 1.0 / limits.down, 1.0 / limits.up, 1.0)
    return f.where(_is_infinite(a), _INF, value)


def angle(a: Parts) -> Expression:
    """From -pi to pi."""
    return f.atan2(a.imaginary, a.real)


def sign(a: Parts) -> Parts:
    """a / |a|, and 0 for 0: torch.sgn. An infinite part gives NaN."""
    size = _size(a)
    root = f.where(_is_infinite(a), _INF, size.root())
    scaled, zero = _times(a, size.scale), f.full_like(root, 0.0)
    return _select(root == 0.0, Parts(zero, zero), Parts(scaled.real / root, scaled.imaginary / root))


# Exponentials


class _Growth(NamedTuple):
    """A power in three factors, so that its product with a sine or cosine is correct where the power overflows."""

    exponent: Expression  # of the first factor
    large: Expression  # whether the other factors are not 1; the power's reciprocal is then negligible
    second: Expression
    third: Expression

    def times(self, trigonometric: Expression, first: Expression) -> Expression:
        """`first` is the base to the power of `exponent`, or about as large."""
        return trigonometric * self.second * first * self.third


def _growth(x: Expression, step: float, factor: float) -> _Growth:
    """`factor` is the base to the power of `step`."""
    large, larger = x > step, x > 2.0 * step
    zero, one = f.full_like(x, 0.0), f.full_like(x, 1.0)
    exponent = x - f.where(larger, 2.0 * step, f.where(large, step, zero))
    return _Growth(exponent, large, f.where(large, factor, one), f.where(larger, factor, one))


def _growth_of_e(x: Expression) -> _Growth:
    step = _range(x).step
    return _growth(x, step, math.exp(step))


def _in_direction(growth: _Growth, first: Expression, x: Expression, y: Expression, unit: Parts) -> Parts:
    """The power with exponent x times `unit`, the cosine and sine of y."""
    astray = f.isinf(x) & ~f.isfinite(y)  # infinity or zero in an unknown direction
    real = f.where(astray, first, growth.times(unit.real, first))
    imaginary = f.where(astray & (x < 0.0), first, growth.times(unit.imaginary, first))
    return Parts(real, f.where(y == 0.0, y, imaginary))


def exp(a: Parts) -> Parts:
    """exp(x) (cos(y) + i sin(y))."""
    x, y = a
    growth = _growth_of_e(x)
    return _in_direction(growth, f.exp(growth.exponent), x, y, Parts(f.cos(y), f.sin(y)))


def exp2(a: Parts) -> Parts:
    """2 to the power of a. Unlike PyTorch, it compensates the rounding error of the angle y log(2)."""
    x, y = a
    step = _range(x).step
    growth = _growth(x, step, 2.0**step)
    high, low = _range(x).log_of_2
    angle = y * high
    lost = f.where(f.absolute(angle) < 4096.0, f.fma(y, f.full_like(y, high), -angle) + y * low, 0.0)
    cosine, sine = f.cos(angle), f.sin(angle)
    unit = Parts(cosine - lost * sine, sine + lost * cosine)
    return _in_direction(growth, f.exp2(growth.exponent), x, y, unit)


def expm1(a: Parts) -> Parts:
    """exp(a) - 1. Where the real part or y is small, the real part is expm1(x) - exp(x) (1 - cos(y)).

    Where exp(a) is not finite, 1 is subtracted from it; PyTorch's kernel gives NaN for some of these.
    """
    x, y = a
    whole = exp(a)
    less_one = whole.real - 1.0
    cosine, sine = f.cos(y), f.sin(y)
    bend = sine * sine / (1.0 + cosine)  # 1 - cos(y), if it is at most 1
    small = (cosine > 0.0) & (f.absolute(less_one) < 0.5) | (f.absolute(x) < 1.0) & (cosine > 0.75)
    near = f.expm1(x) - f.exp(_growth_of_e(x).exponent) * bend  # the exponent is x here
    return Parts(f.where(small, near, less_one), whole.imaginary)


# Logarithms


def _log_absolute(a: Parts, excess: Expression) -> Expression:
    """log|a|. `excess` is |a|² - 1, accurate in all digits where |a| is about 1.

    Takes one logarithm of a rounded number, and adds the rounding error divided by that number.
    """
    size = _size(a)
    near = (excess > -0.5) & (excess < 1.0)
    rounded = f.where(near, 1.0 + excess, size.square)
    rest = f.where(rounded == 0.0, 0.0, f.where(near, excess - (rounded - 1.0), size.lost) / rounded)
    limits = _range(excess)
    unscale = _by_scale(size.scale, -math.log(limits.down), -math.log(limits.up), 0.0)
    return f.where(_is_infinite(a), _INF, 0.5 * (f.log(rounded) + rest) + unscale)


def _two_sum(a: Expression, b: Expression) -> tuple[Expression, Expression]:
    """a + b rounded, and its rounding error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def log(a: Parts) -> Parts:
    """log|a| + i angle(a). The branch cut is along the negative real axis."""
    x, y = f.absolute(a.real), f.absolute(a.imaginary)
    large, small = _ordered(x, y)
    # |a|² - 1 = 2 d + small² + d². The terms can cancel, so the rounding errors of all sums and squares are added.
    d = large - 1.0
    first, second = small * small, d * d
    total, lost_first = _two_sum(2.0 * d, first)
    total, lost_second = _two_sum(total, second)
    lost = lost_first + lost_second + f.fma(small, small, -first) + f.fma(d, d, -second)
    return Parts(_log_absolute(a, total + lost), angle(a))


def log1p(a: Parts) -> Parts:
    """log(1 + a). An infinite part gives infinity, as in `log`; PyTorch's kernel gives NaN for some of these."""
    x, y = a
    whole = Parts(1.0 + x, y)
    real = _log_absolute(whole, x * (2.0 + x) + y * y)
    return Parts(f.where((x == 0.0) & (y == 0.0), x, real), angle(whole))


def log2(a: Parts) -> Parts:
    return _times(log(a), 1.0 / math.log(2.0))


def log10(a: Parts) -> Parts:
    return _times(log(a), 1.0 / math.log(10.0))


# Powers


def sqrt(a: Parts) -> Parts:
    """Kahan's algorithm: the root of |x| + i y, where nothing cancels, whose parts are swapped if x < 0.

    The branch cut is along the negative real axis.
    """
    scale, limits = _scale(a), _range(a.real)
    x, y = f.absolute(a.real) * scale, f.absolute(a.imaginary) * scale
    size = f.where(f.isinf(x), x, f.sqrt(x * x + y * y))
    larger = f.sqrt(0.5 * (size + x)) * _by_scale(scale, limits.down**-0.5, limits.up**-0.5, 1.0)
    smaller = f.where(larger == 0.0, 0.0, 0.5 * f.absolute(a.imaginary) / larger)
    right = a.real >= 0.0
    infinite = f.isinf(a.imaginary)
    real = f.where(infinite, _INF, f.where(right, larger, smaller))
    imaginary = f.where(infinite, _INF, f.where(right, smaller, larger))
    return Parts(real, f.copysign(imaginary, a.imaginary))


def rsqrt(a: Parts) -> Parts:
    """1 / sqrt(a); infinity and NaN for zero, as in PyTorch."""
    root = sqrt(a)
    zero = (root.real == 0.0) & (root.imaginary == 0.0)
    return _select(zero, Parts(f.full_like(root.real, _INF), f.full_like(root.real, _NAN)), _smith(_one(root), root))


def power(a: Parts, b: Parts) -> Parts:
    """exp(b log(a)), as in PyTorch and C, which also give NaN for 0 to the power of 0.

    The error grows with |b log(a)|.
    """
    log_a = log(a)
    exponent = multiply(b, log_a)
    # fma saves a rounding. It is not used where the first product overflows alone.
    real = f.fma(b.real, log_a.real, -(b.imaginary * log_a.imaginary))
    imaginary = f.fma(b.real, log_a.imaginary, b.imaginary * log_a.real)
    return exp(Parts(f.where(f.isfinite(exponent.real), real, exponent.real), imaginary))


# Hyperbolic and trigonometric functions


class _Hyperbolic(NamedTuple):
    """sinh and cosh of x >= 0, up to the factors in `growth`."""

    sinh: Expression
    cosh: Expression
    growth: _Growth  # further factors of both


def _sinh_cosh(x: Expression) -> _Hyperbolic:
    """Computes both from one expm1."""
    growth = _growth_of_e(x)
    less_one = f.expm1(growth.exponent)
    power = less_one + 1.0
    inverse = f.where(growth.large, 0.0, 1.0 / power)
    lost = f.where(growth.large, 0.0, less_one - (power - 1.0))
    small = ~growth.large & (less_one < 1.0)
    bend = 0.5 * less_one * less_one * inverse  # cosh(x) - 1
    sine = f.where(small, less_one - bend, 0.5 * (power - (inverse - lost)))
    cosine = f.where(small, 1.0 + bend, 0.5 * (power + (inverse + lost)))
    return _Hyperbolic(sine, cosine, growth)


def sinh(a: Parts) -> Parts:
    """sinh(x) cos(y) + i cosh(x) sin(y)."""
    x, y = a
    of_x = _sinh_cosh(f.absolute(x))
    real = f.copysign(of_x.sinh, x)
    astray = ~f.isfinite(y) & (f.isinf(x) | (x == 0.0))
    return Parts(
        f.where(astray, x, of_x.growth.times(f.cos(y), real)),
        f.where(y == 0.0, y, of_x.growth.times(f.sin(y), of_x.cosh)),
    )


def cosh(a: Parts) -> Parts:
    """cosh(x) cos(y) + i sinh(x) sin(y)."""
    x, y = a
    of_x = _sinh_cosh(f.absolute(x))
    imaginary = of_x.growth.times(f.sin(y), f.copysign(of_x.sinh, x))
    imaginary = f.where((x == 0.0) & ~f.isfinite(y), x, imaginary)
    return Parts(
        f.where(f.isinf(x) & ~f.isfinite(y), _INF, of_x.growth.times(f.cos(y), of_x.cosh)),
        f.where(y == 0.0, f.copysign(f.full_like(x, 1.0), x) * y, imaginary),
    )


def tanh(a: Parts) -> Parts:
    """(sinh(x) cosh(x) + i sin(y) cos(y)) / (sinh(x)² + cos(y)²), with both terms multiplied by 4 exp(-2|x|)."""
    x, y = a
    less_one = f.expm1(2.0 * f.absolute(x))
    decay = 1.0 / (1.0 + less_one)
    rest = f.where(less_one > 1.0, 1.0 - decay, less_one * decay)  # 1 - decay
    sine, cosine = f.sin(y), f.cos(y)
    below = rest * rest + 4.0 * decay * cosine * cosine
    real = f.copysign(rest * (1.0 + decay) / below, x)
    imaginary = 4.0 * decay * sine * cosine / below
    astray = ~f.isfinite(y)
    real = f.where(astray & f.isinf(x), f.copysign(f.full_like(x, 1.0), x), f.where(astray & (x == 0.0), x, real))
    imaginary = f.where(astray & f.isinf(x), 0.0, imaginary)
    return Parts(real, f.where(y == 0.0, y, imaginary))


def sin(a: Parts) -> Parts:
    return _over_i(sinh(_times_i(a)))


def cos(a: Parts) -> Parts:
    return cosh(_times_i(a))


def tan(a: Parts) -> Parts:
    return _over_i(tanh(_times_i(a)))


# Inverse hyperbolic and trigonometric functions


class _Arc(NamedTuple):
    """For x, y >= 0, arcsin(x + i y) is atan2(x, adjacent) + i rise, and arccos is atan2(adjacent, x) - i rise."""

    adjacent: Expression
    rise: Expression


def _arc(x: Expression, y: Expression) -> _Arc:
    """Hull, Fairgrieve and Tang's algorithm, with one formula where they have several for speed.

    r and s are the distances to the branch points, a = (r + s) / 2; adjacent = sqrt(a² - x²), and
    rise = log(a + sqrt(a² - 1)). The differences a - x and a - 1 are sums of positive terms.
    """
    limits = _range(x)
    largest, unit = f.maximum(x, y), f.full_like(x, 1.0)
    far, farther = largest > limits.far, largest > limits.high
    scale, one = f.where(farther, limits.down, unit), f.where(far, 0.0, unit)
    scaled_x, scaled_y = x * scale, y * scale
    more, less = scaled_x + one, f.absolute(scaled_x - one)
    r, s = f.sqrt(more * more + scaled_y * scaled_y), absolute(Parts(less, scaled_y))
    a = 0.5 * (r + s)
    from_r, from_s = r + more, s + less
    inner = 0.5 * (1.0 / from_r + 1.0 / from_s)  # times y²: a - 1 where x < 1, else a - x
    outer = 0.5 * (y * (y / from_r) + from_s)  # the other of the two
    inside, not_outside = x < 1.0, x <= 1.0
    adjacent = f.sqrt(f.where(not_outside, outer, inner) * (a + x)) * f.where(not_outside, unit, y)
    root = f.sqrt(f.where(inside, inner, outer) * (a + 1.0)) * f.where(inside, y, unit)
    excess = f.where(inside, y * y * inner, outer) + root  # the rise is log1p of it
    one_more = 1.0 + excess
    rest = f.where(far, math.log(2.0), (excess - (one_more - 1.0)) / one_more)
    rest = f.where(farther, math.log(2.0) - math.log(limits.down), rest)
    rise = f.log(f.where(far, a, one_more)) + rest
    return _Arc(f.where(far, y, adjacent), f.where(f.isinf(x) | f.isinf(y), _INF, rise))


def asinh(a: Parts) -> Parts:
    """The branch cuts are along the imaginary axis, beyond i and -i."""
    x, y = f.absolute(a.real), f.absolute(a.imaginary)
    adjacent, rise = _arc(y, x)
    imaginary = f.where(a.imaginary == 0.0, y, f.atan2(y, adjacent))
    return Parts(f.copysign(rise, a.real), f.copysign(imaginary, a.imaginary))


def asin(a: Parts) -> Parts:
    """The branch cuts are along the real axis, beyond 1 and -1."""
    return _over_i(asinh(_times_i(a)))


def _acos(a: Parts) -> Parts:
    """The real part of arccos, and its imaginary part without a sign."""
    adjacent, rise = _arc(f.absolute(a.real), f.absolute(a.imaginary))
    unknown = (a.real == 0.0) & f.isnan(a.imaginary)
    return Parts(f.where(unknown, math.pi / 2, f.atan2(adjacent, a.real)), rise)


def acos(a: Parts) -> Parts:
    """The branch cuts are along the real axis, beyond 1 and -1.

    For 0.5 + 0 i the imaginary part is -0, as in C99; PyTorch's complex128 kernel gives 0.
    """
    real, rise = _acos(a)
    return Parts(real, -f.copysign(rise, a.imaginary))


def acosh(a: Parts) -> Parts:
    """The branch cut is along the real axis, below 1."""
    angle, rise = _acos(a)
    return Parts(rise, f.copysign(angle, a.imaginary))


def atanh(a: Parts) -> Parts:
    """For x >= 0: log1p(4 x / ((1 - x)² + y²)) / 4 + i angle(1 - x² - y² + 2 i y) / 2 (Kahan, with other safeguards).

    The branch cuts are along the real axis, beyond 1 and -1.
    """
    x, y = f.absolute(a.real), a.imaginary
    less = 1.0 - x
    scale = _scale(Parts(less, y))
    scaled = _times(Parts(less, y), scale)
    squared = scaled.real * scaled.real + scaled.imaginary * scaled.imaginary
    quotient = 4.0 * (x * scale) / squared * scale
    limits = _range(x)
    at_one = scale == limits.up  # x is 1, and the quotient can be infinite
    one_more = 1.0 + quotient
    rest = f.where(at_one, 2.0 * math.log(limits.up), (quotient - (one_more - 1.0)) / one_more)
    rise = 0.25 * (f.log(f.where(at_one, 4.0 / squared, one_more)) + rest)
    rise = f.where(_is_infinite(a) | (x == 0.0), 0.0, f.where((less == 0.0) & (y == 0.0), _INF, rise))
    far = f.isinf(y) | (f.maximum(x, f.absolute(y)) > limits.high)
    angle = f.atan2(2.0 * y, less * (1.0 + x) - y * y)
    return Parts(
        f.copysign(rise, a.real),
        f.where(far, f.copysign(f.full_like(y, math.pi / 2), y), 0.5 * angle),
    )


def atan(a: Parts) -> Parts:
    """The branch cuts are along the imaginary axis, beyond i and -i."""
    return _over_i(atanh(_times_i(a)))


# The names are those of expression.OPERATIONS, for operations that are there.
FUNCTIONS: dict[str, Callable[..., Parts]] = {
    function.__name__: function
    for function in (
        *(multiply, divide, reciprocal, sign),
        *(exp, exp2, expm1, log, log2, log10, log1p, sqrt, rsqrt, power),
        *(sin, cos, tan, sinh, cosh, tanh, asin, acos, atan, asinh, acosh, atanh),
    )
}
