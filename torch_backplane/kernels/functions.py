"""Functions for formulas: `from torch_backplane.kernels import functions as f`, then `f.exp(a)`.

Names and semantics are PyTorch's. Arguments are traced values and Python numbers; at least one is a traced value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_backplane.kernels.dtypes import facts
from torch_backplane.kernels.expression import (
    Expression,
    Formula,
    Loop,
    Number,
    Operand,
    apply,
    constant,
    join,
    registered,
    same_dtype,
    trace,
)


def _function(name: str) -> Callable[..., Expression]:
    def function(*operands: Operand) -> Expression:
        return apply(name, *operands)

    function.__name__ = function.__qualname__ = name
    return function


exp, exp2, expm1 = _function("exp"), _function("exp2"), _function("expm1")
log, log2, log10, log1p = _function("log"), _function("log2"), _function("log10"), _function("log1p")
sqrt, rsqrt = _function("sqrt"), _function("rsqrt")
sin, cos, tan = _function("sin"), _function("cos"), _function("tan")
asin, acos, atan, atan2 = _function("asin"), _function("acos"), _function("atan"), _function("atan2")
sinh, cosh = _function("sinh"), _function("cosh")
asinh, acosh, atanh = _function("asinh"), _function("acosh"), _function("atanh")
erf, erfc, lgamma = _function("erf"), _function("erfc"), _function("lgamma")
floor, ceil, trunc = _function("floor"), _function("ceil"), _function("trunc")
round = _function("round")  # halves to even
isnan, isinf, isfinite, signbit = _function("isnan"), _function("isinf"), _function("isfinite"), _function("signbit")
copysign, hypot, nextafter = _function("copysign"), _function("hypot"), _function("nextafter")
fma, fmod = _function("fma"), _function("fmod")
minimum, maximum = _function("minimum"), _function("maximum")  # NaN if either is
fmin, fmax = _function("fmin"), _function("fmax")  # the other operand if one is NaN
absolute = _function("absolute")


def where(condition: Expression, a: Operand, b: Operand) -> Expression:
    """Returns a where the condition holds, else b. The condition is bool; a and b have the same dtype."""
    if not isinstance(condition, Expression) or condition.dtype != torch.bool:
        raise TypeError("the condition of where must be a traced bool: compare, or convert with .to(torch.bool)")
    a, b = same_dtype("where", (a, b))
    if a.is_complex:
        return join(where(condition, a.real, b.real), where(condition, a.imag, b.imag))
    return Expression("where", a.dtype, (condition, a, b))


def lerp(start: Operand, end: Operand, weight: Operand) -> Operand:
    """Linear interpolation, computed from the nearer end, so that a weight of 1 gives exactly `end`."""
    from_start, from_end = start + weight * (end - start), end - (end - start) * (1.0 - weight)
    if not isinstance(weight, Expression):
        return from_start if abs(weight) < 0.5 else from_end
    return where(absolute(weight) < 0.5, from_start, from_end)


def index(dim: int | None = None) -> Expression:
    """The element's position along dimension `dim` of the results, or without `dim` its number in row-major order.

    The result is int64. Available only in pointwise kernels, outside of loops.
    """
    return Expression("index", torch.int64, value=dim)


def real(a: Expression) -> Expression:
    """The real part; a itself if it is real."""
    return a.real


def imag(a: Expression) -> Expression:
    """The imaginary part; zero if a is real."""
    return a.imag


def complex(real: Operand, imaginary: Operand) -> Expression:
    """The complex number with these parts, both float32 or both float64."""
    return join(*same_dtype("complex", (real, imaginary)))


def conj(a: Expression) -> Expression:
    """The complex conjugate; a itself if it is real."""
    return join(a.real, -a.imag) if a.is_complex else a


def full_like(a: Expression, value: Number) -> Expression:
    """A constant of a's dtype, for operations in which no other operand determines the dtype."""
    return constant(value, a.dtype)


def while_loop(condition: Formula, body: Formula, state: Sequence[Expression]) -> tuple[Expression, ...]:
    """Repeats `state = body(*state)` while `condition(*state)` holds, and returns the final state.

    `condition` and `body` see only the state, so it must contain every value that they need. The caller must ensure
    that the loop ends, also for NaN.

    Raises:
        TypeError: the condition does not return one bool, or the body returns other dtypes than those of the state.
    """
    dtypes = [value.dtype for value in state]
    loop = Loop(trace(condition, dtypes), trace(body, dtypes))
    if loop.condition.result_dtypes != (torch.bool,):
        raise TypeError("the condition of a loop must return one traced bool")
    if loop.body.result_dtypes != tuple(dtypes):
        raise TypeError(f"the body of a loop returned {loop.body.result_dtypes} for a state of {tuple(dtypes)}")
    repeated = Expression("loop", dtypes[0], tuple(state), loop)
    return tuple(Expression("loop_result", dtype, (repeated,), i) for i, dtype in enumerate(dtypes))


def angle(a: Expression) -> Expression:
    """The argument of a complex number, from -π to π. Of a real number: 0 or π, and NaN for NaN."""
    if a.is_complex:
        return registered["complex operation"]("angle", (a,))
    return where(isnan(a), a, where(a < 0.0, full_like(a, math.pi), 0.0))


def is_float(value: Expression) -> bool:
    """Whether the dtype of `value` is floating-point in PyTorch's sense, which excludes complex dtypes."""
    return facts(value.dtype).category == "float"


def power(a: Operand, b: Operand) -> Expression:
    """Return a to the power of b. Integer powers wrap; a negative power of an integer other than 1 and -1 is zero."""
    a, b = same_dtype("power", (a, b))
    if is_float(a) or a.is_complex:
        return apply("power", a, b)

    def body(base: Expression, left: Expression, result: Expression) -> tuple[Expression, ...]:
        return base * base, left >> 1, where((left & 1) != 0, result * base, result)

    _, _, result = while_loop(lambda base, left, result: left > 0, body, (a, b, full_like(a, 1)))
    if facts(a.dtype).category == "unsigned":
        return result
    inverse = where(a == 1, a, where(a == -1, 1 - ((b & 1) << 1), full_like(a, 0)))
    return where(b < 0, inverse, result)


def gcd(a: Operand, b: Operand) -> Expression:
    """The non-negative greatest common divisor of integers; zero for two zeros."""
    a, b = same_dtype("gcd", (a, b))
    found, _ = while_loop(lambda a, b: b != 0, lambda a, b: (b, fmod(a, b)), (absolute(a), absolute(b)))
    return absolute(found)


def rounded_to(a: Expression, dtype: torch.dtype) -> Expression:
    """Rounds a, which is float32, to a value of float16 or bfloat16, ties to even. For other dtypes: a itself."""
    if dtype == torch.bfloat16:
        bits = a.view(torch.int32)
        return where(a != a, a, ((bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000).view(torch.float32))
    if dtype != torch.float16:
        return a
    magnitude = absolute(a)
    bits = magnitude.view(torch.int32)
    normal = ((bits + (0xFFF + ((bits >> 13) & 1))) & -0x2000).view(torch.float32)
    # Floats in [0.5, 1) are multiples of 2^-24, like float16 below 2^-14, so the addition rounds.
    found = where(magnitude < 2.0**-14, (magnitude + 0.5) - 0.5, normal)
    return where(a != a, a, copysign(where(magnitude < 65520.0, found, math.inf), a))


def trunc_divide(a: Operand, b: Operand) -> Expression:
    """Return a / b rounded toward zero: torch.div(a, b, rounding_mode="trunc"). An integer divided by zero is zero."""
    return trunc_divide_in_steps(a, b, torch.float32)


def trunc_divide_in_steps(a: Operand, b: Operand, stored: torch.dtype) -> Expression:
    """`trunc_divide` of operands that have the dtype `stored` in memory. Rounds each step to it, as PyTorch does."""
    a, b = same_dtype("trunc_divide", (a, b))
    return trunc(rounded_to(a / b, stored)) if is_float(a) else apply("trunc_divide", a, b)


def floor_divide(a: Operand, b: Operand) -> Expression:
    """Return a / b rounded down: torch.div(a, b, rounding_mode="floor"). An integer divided by zero is zero.

    For floats the exact remainder decides, as in Python's //, because a / b can have been rounded up to an integer.
    """
    return floor_divide_in_steps(a, b, torch.float32)


def floor_divide_in_steps(a: Operand, b: Operand, stored: torch.dtype) -> Expression:
    """`floor_divide` of operands that have the dtype `stored` in memory. Rounds each step to it, as PyTorch does."""
    a, b = same_dtype("floor_divide", (a, b))
    if not is_float(a):
        return apply("floor_divide", a, b)
    rest = fmod(a, b)
    quotient = rounded_to(rounded_to(a - rest, stored) / b, stored)
    fewer = (rest != 0.0) & ((b < 0.0) != (rest < 0.0))
    quotient = where(fewer, rounded_to(quotient - 1.0, stored), quotient)
    rounded = floor(quotient)
    rounded = where(quotient - rounded > 0.5, rounded + 1.0, rounded)
    signed_zero = copysign(0.0, a / b)
    return where(b == 0.0, a / b, where(quotient == 0.0, signed_zero, rounded))


def remainder(a: Operand, b: Operand) -> Expression:
    """The remainder of `floor_divide`, with the divisor's sign: torch.remainder. An integer modulo zero is zero."""
    a, b = same_dtype("remainder", (a, b))
    if not is_float(a):
        return apply("remainder", a, b)
    rest = fmod(a, b)
    return where((rest != 0.0) & ((b < 0.0) != (rest < 0.0)), rest + b, rest)


def tanh(a: Expression) -> Expression:
    """Return the hyperbolic tangent of a, exactly 1 or -1 for large |a|.

    OpenCL allows errors in the last bits, and 1 - tanh(a)² would then never be 0.
    """
    if a.is_complex:
        return apply("tanh", a)
    far = 10.0 if a.dtype == torch.float32 else 20.0
    return where(absolute(a) > far, copysign(full_like(a, 1.0), a), apply("tanh", a))


def sigmoid(a: Expression) -> Expression:
    """Return 1 / (1 + exp(-a))."""
    return 1.0 / (1.0 + exp(-a))


def sign(a: Expression) -> Expression:
    """-1, 0 or 1; 0 for NaN. Of a complex number, a / |a|."""
    if a.is_complex:
        return registered["complex operation"]("sign", (a,))
    if a.dtype == torch.bool:
        return a
    return (a > 0).to(a.dtype) - (a < 0).to(a.dtype)


def clamp(a: Expression, least: Operand, greatest: Operand) -> Expression:
    """Limits a to [least, greatest]. NaN if any operand is NaN."""
    return minimum(maximum(a, least), greatest)
