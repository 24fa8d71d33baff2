"""Inductor's scalar operations as formulas, the same that eager kernels are made of."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels import special
from torch_backplane.kernels.dtypes import facts
from torch_backplane.kernels.expression import Expression, Program, apply, trace


def _operation(name: str) -> Callable[..., Expression]:
    return lambda *operands: apply(name, *operands)


def _of_floats(function: Callable[..., Expression]) -> Callable[..., Expression]:
    """Integers stay unchanged."""
    return lambda a: function(a) if f.is_float(a) else a


def _truth(a: Expression) -> Expression:
    return a.to(torch.bool)


def _signbit(a: Expression) -> Expression:
    if f.is_float(a):
        return f.signbit(a)
    return f.full_like(a, False) if a.dtype == torch.bool else a < 0


def _as_float(a: Any) -> Any:
    return a if not isinstance(a, Expression) or f.is_float(a) else a.to(torch.float32)


def _true_divide(a: Any, b: Any) -> Expression:
    return apply("divide", _as_float(a), _as_float(b))


def _ldexp(a: Expression, exponent: Expression) -> Expression:
    return a * f.exp2(exponent.to(a.dtype))


def _frexp(a: Expression) -> tuple[Expression, Expression]:
    """The mantissa, in [0.5, 1), and the exponent (int32), from the bits of a."""
    wide = a.dtype == torch.float64
    integer, shift, bias = (torch.int64, 52, 1022) if wide else (torch.int32, 23, 126)
    tiny, scale, steps = (2.0**-1022, 2.0**54, 54) if wide else (2.0**-126, 2.0**25, 25)
    is_subnormal = (f.absolute(a) < tiny) & (a != 0.0)
    bits = f.where(is_subnormal, a * scale, a).view(integer)
    exponents = (1 << (11 if wide else 8)) - 1
    exponent = ((bits >> shift) & exponents) - bias - f.where(is_subnormal, f.full_like(bits, steps), 0)
    # The bits of the mantissa with the exponent of 0.5.
    mantissa = ((bits & ~(exponents << shift)) | (bias << shift)).view(a.dtype)
    special_value = (a == 0.0) | ~f.isfinite(a)
    exponent = f.where(special_value, f.full_like(exponent, 0), exponent)
    return f.where(special_value, a, mantissa), exponent.to(torch.int32)


def _polygamma(n: Expression, x: Expression) -> Expression:
    factor = f.exp(f.lgamma(n + 1.0))
    sign = f.where(f.fmod(n, f.full_like(n, 2.0)) == 0.0, f.full_like(n, -1.0), 1.0)
    by_series = sign * factor * special.zeta(n + 1.0, x)
    return f.where(n == 0.0, special.digamma(x), f.where(n == 1.0, special.trigamma(x), by_series))


def _ndtr(x: Expression) -> Expression:
    return f.erfc(x * -math.sqrt(0.5)) * 0.5


def _shifted(chebyshev: Callable[..., Expression]) -> Callable[..., Expression]:
    return lambda x, n: chebyshev(x + x - 1.0, n)


# Functions of floats: integers are converted to float32. All operands get the same dtype.
_FLOAT_FUNCTIONS = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh tanh "
    "erf erfc lgamma sigmoid hypot copysign"
)

FORMULAS: dict[str, Callable[..., Any]] = {
    **{name: getattr(f, name) for name in _FLOAT_FUNCTIONS.split()},
    "isnan": f.isnan,
    "isinf": f.isinf,
    "nextafter": f.nextafter,
    "fma": f.fma,
    "fmod": f.fmod,
    "remainder": f.remainder,
    "sign": f.sign,
    "where": f.where,
    "abs": lambda a: a if a.dtype == torch.bool else f.absolute(a),
    "floor": _of_floats(f.floor),
    "ceil": _of_floats(f.ceil),
    "trunc": _of_floats(f.trunc),
    "round": _of_floats(f.round),
    "neg": _operation("negative"),
    "add": _operation("add"),
    "sub": _operation("subtract"),
    "mul": _operation("multiply"),
    "mul_rn": _operation("multiply"),  # kernels contract no operations
    "truediv": _true_divide,
    "int_truediv": _true_divide,
    "div_rn": _true_divide,
    "floordiv": f.floor_divide,
    "truncdiv": f.trunc_divide,
    "mod": f.fmod,
    "pow": f.power,
    "square": lambda a: a * a,
    "reciprocal": lambda a: 1.0 / _as_float(a),
    "relu": lambda a: f.maximum(a, 0),
    "minimum": f.minimum,
    "maximum": f.maximum,
    "eq": _operation("equal"),
    "ne": _operation("not_equal"),
    "lt": _operation("less"),
    "le": _operation("less_equal"),
    "gt": _operation("greater"),
    "ge": _operation("greater_equal"),
    "logical_and": lambda a, b: _truth(a) & _truth(b),
    "logical_or": lambda a, b: _truth(a) | _truth(b),
    "logical_xor": lambda a, b: _truth(a) ^ _truth(b),
    "logical_not": lambda a: ~_truth(a),
    "bitwise_and": _operation("bitwise_and"),
    "bitwise_or": _operation("bitwise_or"),
    "bitwise_xor": _operation("bitwise_xor"),
    "bitwise_not": _operation("bitwise_not"),
    "bitwise_left_shift": _operation("shift_left"),
    "bitwise_right_shift": _operation("shift_right"),
    # Python's operators in index arithmetic
    "and_": _operation("bitwise_and"),
    "or_": _operation("bitwise_or"),
    "xor": _operation("bitwise_xor"),
    "lshift": _operation("shift_left"),
    "rshift": _operation("shift_right"),
    "signbit": _signbit,
    "ldexp": _ldexp,
    "frexp": _frexp,
    "identity": lambda a: a,
    # Special functions
    "airy_ai": special.airy_ai,
    "bessel_j0": special.j0,
    "bessel_j1": special.j1,
    "bessel_y0": special.y0,
    "bessel_y1": special.y1,
    "digamma": special.digamma,
    "erfcx": special.erfcx,
    "erfinv": special.erfinv,
    "igamma": special.gammainc,
    "igammac": special.gammaincc,
    "gammainc": special.gammainc,
    "gammaincc": special.gammaincc,
    "i0": special.i0,
    "i0e": special.i0e,
    "i1": special.i1,
    "i1e": special.i1e,
    "log_ndtr": special.log_ndtr,
    "modified_bessel_i0": special.i0,
    "modified_bessel_i1": special.i1,
    "modified_bessel_k0": special.k0,
    "modified_bessel_k1": special.k1,
    "ndtr": _ndtr,
    "ndtri": special.ndtri,
    "polygamma": _polygamma,
    "scaled_modified_bessel_k0": special.k0e,
    "scaled_modified_bessel_k1": special.k1e,
    "spherical_bessel_j0": special.spherical_j0,
    "zeta": special.zeta,
    "chebyshev_polynomial_t": special.chebyshev_t,
    "chebyshev_polynomial_u": special.chebyshev_u,
    "chebyshev_polynomial_v": special.chebyshev_v,
    "chebyshev_polynomial_w": special.chebyshev_w,
    "hermite_polynomial_h": special.hermite_h,
    "hermite_polynomial_he": special.hermite_he,
    "laguerre_polynomial_l": special.laguerre_l,
    "legendre_polynomial_p": special.legendre_p,
    "shifted_chebyshev_polynomial_t": _shifted(special.chebyshev_t),
    "shifted_chebyshev_polynomial_u": _shifted(special.chebyshev_u),
    "shifted_chebyshev_polynomial_v": _shifted(special.chebyshev_v),
    "shifted_chebyshev_polynomial_w": _shifted(special.chebyshev_w),
}

# Operations that round a float and convert it to an integer, with their rounding.
TO_INTEGER = {"floor_to_int": "floor", "ceil_to_int": "ceil", "trunc_to_int": "trunc", "round_to_int": "round"}


def computed_in(name: str, dtypes: list[torch.dtype]) -> torch.dtype:
    """The dtype to which the operands are converted: PyTorch's promotion, and a float for functions of floats."""
    promoted = dtypes[0]
    for dtype in dtypes[1:]:
        promoted = torch.promote_types(promoted, dtype)
    if name in _FLOAT_FUNCTIONS.split() and facts(promoted).category not in ("float", "complex"):
        return torch.float32
    return promoted


@functools.lru_cache(4096)
def traced(name: str, dtypes: tuple[torch.dtype, ...], numbers: tuple[Any, ...]) -> Program:
    """Traces a formula.

    Args:
        dtypes: of the operands that are variables.
        numbers: for each operand its value if it is a Python number, else None.
    """
    formula = FORMULAS[name]

    def on_operands(*values: Expression) -> Any:
        given = iter(values)
        return formula(*(next(given) if number is None else number for number in numbers))

    return trace(on_operands, dtypes)
