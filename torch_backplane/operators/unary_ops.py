"""Elementwise operators of one tensor: signs, rounding, exponentials, trigonometry and special functions."""

from __future__ import annotations

import math

import torch

from torch_backplane.kernels import Expression, special
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import part_dtype, value_dtype
from torch_backplane.kernels.expression import Formula
from torch_backplane.planning import (
    Call,
    Refused,
    check_same_dtype,
    operator,
    plan_pointwise,
    pointwise,
    run_pointwise,
)

pointwise("neg", lambda a: -a, dtypes="complex")
pointwise("reciprocal", lambda a: 1.0 / a, dtypes="complex")
pointwise("sqrt", f.sqrt, dtypes="complex")
pointwise("rsqrt", f.rsqrt, dtypes="complex")


# Bitwise and logical operators

pointwise("bitwise_not", lambda a: ~a)
pointwise("logical_not", lambda a: ~a.to(torch.bool), dtypes="complex")


# Sign and magnitude


def absolute(a: Expression) -> Expression:
    return a if a.dtype == torch.bool else f.absolute(a)


pointwise("abs", absolute, dtypes="complex")
pointwise("sign", f.sign)
pointwise("sgn", f.sign, dtypes="complex")


def signbit(a: Expression) -> Expression:
    if f.is_float(a):
        return f.signbit(a)
    return f.full_like(a, False) if a.dtype == torch.bool else a < 0


pointwise("signbit", signbit)


@operator("angle", dtypes="complex")
def angle(call: Call, self: torch.Tensor) -> torch.Tensor:
    """As in PyTorch, a real result for complex numbers is contiguous."""
    if self.is_complex() and not any(given.is_complex() for given in call.written):
        call.outputs(elementwise=True, contiguous=True)
    return plan_pointwise("angle", f.angle, call, (self,))


# Rounding; integers stay unchanged


def _of_floats(function: Formula) -> Formula:
    return lambda a: function(a) if f.is_float(a) else a


def _round_decimals(a: Expression, scale: Expression, before_point: bool) -> Expression:
    if not f.is_float(a):
        return a
    return f.round(a / scale) * scale if before_point else f.round(a * scale) / scale


@operator("round.decimals")
def round_decimals(call: Call, self: torch.Tensor, decimals: int) -> torch.Tensor:
    scale = 10.0 ** abs(decimals) if abs(decimals) < 309 else math.inf
    return plan_pointwise("round.decimals", _round_decimals, call, (self, scale, decimals < 0))


pointwise("floor", _of_floats(f.floor))
pointwise("ceil", _of_floats(f.ceil))
pointwise("trunc", _of_floats(f.trunc))
pointwise("round", _of_floats(f.round))
pointwise("frac", lambda a: a - f.trunc(a))


# Exponentials, logarithms, trigonometry

for function in (
    *(f.exp, f.exp2, f.expm1, f.log, f.log2, f.log10, f.log1p),
    *(f.sin, f.cos, f.tan, f.asin, f.acos, f.atan),
    *(f.sinh, f.cosh, f.asinh, f.acosh, f.atanh),
):
    pointwise(function.__name__, function, dtypes="complex")
pointwise("sigmoid", f.sigmoid, dtypes="complex")
pointwise("tanh", f.tanh, dtypes="complex")
pointwise("rad2deg", lambda a: a * (180.0 / math.pi))
pointwise("deg2rad", lambda a: a * (math.pi / 180.0))


def sinc(a: Expression) -> Expression:
    return f.where(a == 0.0, 1.0, f.sin(math.pi * a) / (math.pi * a))


def entr(a: Expression) -> Expression:
    return f.where(f.isnan(a), a, f.where(a > 0.0, -a * f.log(a), f.where(a == 0.0, 0.0, f.full_like(a, -math.inf))))


pointwise("sinc", sinc, dtypes="complex")
pointwise("special_entr", entr)


# The logit; with eps, its argument is clamped to [eps, 1 - eps]


def _logit(a: Expression, *ends: Expression) -> Expression:
    if ends:
        first, last = ends
        a = f.where(a < first, first, f.where(a > last, last, a))
    return f.log(a / (1.0 - a))


def ends(eps: float | None) -> tuple[float, ...]:
    """The bounds to which the argument of a logit is clamped, if any."""
    return () if eps is None else (eps, 1.0 - eps)


@operator("logit")
def logit(call: Call, self: torch.Tensor, eps: float | None) -> torch.Tensor:
    return plan_pointwise("logit", _logit, call, (self, *ends(eps)))


# Error and gamma functions

pointwise("erfinv", special.erfinv)
pointwise("erf", f.erf)
pointwise("erfc", f.erfc)
pointwise("lgamma", f.lgamma)
pointwise("special_erfcx", special.erfcx)
pointwise("special_ndtri", special.ndtri)
pointwise("special_log_ndtr", special.log_ndtr)
pointwise("digamma", special.digamma)

# Orders that gradients of lgamma and digamma use. With a constant order, zeta takes two thirds of the time.
_DERIVATIVES: dict[int, Formula] = {
    0: special.digamma,
    1: special.trigamma,
    **{n: lambda x, n=n: special.polygamma_factor(n) * special.zeta(f.full_like(x, n + 1.0), x) for n in (2, 3, 4, 5)},
}


@operator("polygamma", static={"n": _DERIVATIVES})
def polygamma(call: Call, n: int, self: torch.Tensor) -> torch.Tensor:
    call.meta()  # refuses negative n
    if n in _DERIVATIVES:
        return plan_pointwise(f"polygamma{n}", _DERIVATIVES[n], call, (self,))
    numbers = (special.polygamma_factor(n), float(n + 1))
    return plan_pointwise("polygamma", lambda x, factor, s: factor * special.zeta(s, x), call, (self, *numbers))


@operator("mvlgamma", checks=["p >= 1"])
def mvlgamma(call: Call, self: torch.Tensor, p: int) -> torch.Tensor:
    if self.dtype == torch.bool:
        raise Refused("mvlgamma of bools")
    call.outputs(contiguous=True)
    numbers = (p, special.mvlgamma_constant(p))
    return plan_pointwise("mvlgamma", special.mvlgamma, call, (self, *numbers))


# Bessel functions

pointwise("i0", special.i0)
pointwise("special_i0e", special.i0e)
pointwise("special_i1", special.i1)
pointwise("special_i1e", special.i1e)
pointwise("special_modified_bessel_i0", special.i0)
pointwise("special_modified_bessel_i1", special.i1)
pointwise("special_modified_bessel_k0", special.k0)
pointwise("special_modified_bessel_k1", special.k1)
pointwise("special_scaled_modified_bessel_k0", special.k0e)
pointwise("special_scaled_modified_bessel_k1", special.k1e)
pointwise("special_bessel_j0", special.j0)
pointwise("special_bessel_j1", special.j1)
pointwise("special_bessel_y0", special.y0)
pointwise("special_bessel_y1", special.y1)
pointwise("special_spherical_bessel_j0", special.spherical_j0)
pointwise("special_airy_ai", special.airy_ai)


# Parts of floating-point numbers


def frexp(a: Expression) -> tuple[Expression, Expression]:
    """A mantissa in [0.5, 1) and an exponent. Zeros, infinities and NaN have the exponent 0."""
    wide = a.dtype == torch.float64
    integer, mantissa_bits, bias = (torch.int64, 52, 1022) if wide else (torch.int32, 23, 126)
    exponents = (1 << (11 if wide else 8)) - 1
    # Subnormal numbers are scaled up first.
    tiny = f.absolute(a) < 2.0 ** -(bias - 1)
    bits = f.where(tiny, a * 2.0**64, a).view(integer)
    exponent = ((bits >> mantissa_bits) & exponents) - bias - f.where(tiny, f.full_like(bits, 64), 0)
    mantissa = ((bits & ~(exponents << mantissa_bits)) | (bias << mantissa_bits)).view(a.dtype)
    itself = (a == 0.0) | ~f.isfinite(a)
    return f.where(itself, a, mantissa), f.where(itself, 0, exponent)


pointwise("frexp.Tensor", frexp)


# Conjugates and non-finite numbers


@operator("_conj_physical", dtypes="complex")
@operator("conj_physical.out", "conj_physical_", variants=False, dtypes="complex")  # the functional form is composed
def conj_physical(call: Call, self: torch.Tensor) -> torch.Tensor:
    """Also takes lazily conjugated tensors, which PyTorch passes to this operator."""
    if call.name == "aten::conj_physical_" and not self.is_complex():
        return self
    check_same_dtype(call, self.dtype)
    (out,) = call.outputs(elementwise=True)
    return out.copy_(self.conj())


def replace_nonfinite(a: Expression, nan: Expression, posinf: Expression, neginf: Expression) -> Expression:
    if a.is_complex:
        return f.complex(*(replace_nonfinite(part, nan, posinf, neginf) for part in (a.real, a.imag)))
    a = f.where(f.isnan(a), nan, a)
    return f.where(a == math.inf, posinf, f.where(a == -math.inf, neginf, a))


@operator("nan_to_num", passed_through=["nan", "posinf", "neginf"], dtypes="complex")
def nan_to_num(
    call: Call, self: torch.Tensor, nan: float | None, posinf: float | None, neginf: float | None
) -> torch.Tensor:
    """Infinities become the greatest and least numbers of the stored dtype, which formulas do not know."""
    check_same_dtype(call, self.dtype)
    of_integers = not (self.is_floating_point() or self.is_complex())
    if of_integers and call.is_in_place:
        return call.written[0]  # with any strides: in PyTorch it is a copy to itself
    (out,) = call.outputs(elementwise=True)
    if of_integers:
        return out.copy_(self)
    dtype, limits = part_dtype(value_dtype(self.dtype)), torch.finfo(self.dtype)
    numbers = [
        (0.0 if nan is None else nan, dtype),
        (limits.max if posinf is None else posinf, dtype),
        (limits.min if neginf is None else neginf, dtype),
    ]
    run_pointwise(replace_nonfinite, [out], [self], numbers, key="nan_to_num", name="nan_to_num")
    return out
