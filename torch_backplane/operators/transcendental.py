"""Exponentials, logarithms, trigonometry, and the error and gamma functions."""

from __future__ import annotations

import math

import torch

from torch_backplane.kernels import Expression, special
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.expression import Formula
from torch_backplane.planning import Call, RunOnCPU, operator, plan_pointwise, pointwise, run_pointwise

for function in (
    *(f.exp, f.exp2, f.expm1, f.log, f.log2, f.log10, f.log1p),
    *(f.sin, f.cos, f.tan, f.asin, f.acos, f.atan),
    *(f.sinh, f.cosh, f.asinh, f.acosh, f.atanh),
):
    pointwise(function.__name__, function, dtypes="complex")
pointwise("erf", f.erf)
pointwise("erfc", f.erfc)
pointwise("lgamma", f.lgamma)
pointwise("atan2", f.atan2)
pointwise("rad2deg", lambda a: a * (180.0 / math.pi))
pointwise("deg2rad", lambda a: a * (math.pi / 180.0))


def sinc(a: Expression) -> Expression:
    return f.where(a == 0.0, 1.0, f.sin(math.pi * a) / (math.pi * a))


def logaddexp(a: Expression, b: Expression) -> Expression:
    same = f.isinf(a) & (a == b)
    return f.where(same, a, f.maximum(a, b) + f.log1p(f.exp(-f.absolute(a - b))))


def logaddexp2(a: Expression, b: Expression) -> Expression:
    same = f.isinf(a) & (a == b)
    return f.where(same, a, f.maximum(a, b) + f.log1p(f.exp2(-f.absolute(a - b))) * (1.0 / math.log(2.0)))


def _zero_unless_nan(a: Expression, b: Expression, product: Expression) -> Expression:
    return f.where(f.isnan(b), b, f.where(a == 0.0, 0.0, product))


def entr(a: Expression) -> Expression:
    return f.where(f.isnan(a), a, f.where(a > 0.0, -a * f.log(a), f.where(a == 0.0, 0.0, f.full_like(a, -math.inf))))


pointwise("sinc", sinc, dtypes="complex")
pointwise("logaddexp", logaddexp)
pointwise("logaddexp2", logaddexp2)
pointwise("xlogy.Tensor", lambda a, b: _zero_unless_nan(a, b, a * f.log(b)))
pointwise("special_xlog1py", lambda a, b: _zero_unless_nan(a, b, a * f.log1p(b)))
pointwise("special_entr", entr)


# The logit, with its argument held eps away from 0 and 1 where eps is given


def _logit(a: Expression, *ends: Expression) -> Expression:
    if ends:
        first, last = ends
        a = f.where(a < first, first, f.where(a > last, last, a))
    return f.log(a / (1.0 - a))


def _logit_backward(grad: Expression, a: Expression, *ends: Expression) -> Expression:
    slope = grad / (a * (1.0 - a))
    if ends:
        first, last = ends
        return f.where((a >= first) & (a <= last), slope, 0.0)
    return f.where((a < 0.0) | (a > 1.0), math.nan, slope)


def _ends(eps: float | None) -> tuple[float, ...]:
    """What an argument is held between."""
    return () if eps is None else (eps, 1.0 - eps)


@operator("logit")
def logit(call: Call, self: torch.Tensor, eps: float | None) -> torch.Tensor:
    return plan_pointwise("logit", _logit, call, (self, *_ends(eps)))


@operator("logit_backward")
def logit_backward(call: Call, grad_output: torch.Tensor, self: torch.Tensor, eps: float | None) -> torch.Tensor:
    return plan_pointwise("logit_backward", _logit_backward, call, (grad_output, self, *_ends(eps)))


# Error and gamma functions

pointwise("erfinv", special.erfinv)
pointwise("special_erfcx", special.erfcx)
pointwise("special_ndtri", special.ndtri)
pointwise("special_log_ndtr", special.log_ndtr)
pointwise("digamma", special.digamma)
pointwise("special_zeta", special.zeta)
pointwise("igamma", special.gammainc)
pointwise("igammac", special.gammaincc)


# Those that gradients of lgamma and digamma are made of: zeta of a number in the text takes two thirds of the time.
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
        raise RunOnCPU("mvlgamma of bools")  # which refuses it
    call.outputs(elementwise=True, contiguous=True)
    numbers = (p, special.mvlgamma_constant(p))
    return plan_pointwise("mvlgamma", special.mvlgamma, call, (self, *numbers))


# Of the bits of floats


def frexp(a: Expression) -> tuple[Expression, Expression]:
    """A mantissa of 0.5 to 1 and an exponent; zeros, infinities and NaN have the exponent 0."""
    wide = a.dtype == torch.float64
    integer, mantissa_bits, bias = (torch.int64, 52, 1022) if wide else (torch.int32, 23, 126)
    exponents = (1 << (11 if wide else 8)) - 1
    # Numbers below the least normal one are scaled up first.
    tiny = f.absolute(a) < 2.0 ** -(bias - 1)
    bits = f.where(tiny, a * 2.0**64, a).view(integer)
    exponent = ((bits >> mantissa_bits) & exponents) - bias - f.where(tiny, f.full_like(bits, 64), 0)
    mantissa = ((bits & ~(exponents << mantissa_bits)) | (bias << mantissa_bits)).view(a.dtype)
    itself = (a == 0.0) | ~f.isfinite(a)
    return f.where(itself, a, mantissa), f.where(itself, 0, exponent)


def _next_bits(bits: Expression, towards: Expression, infinity: int) -> Expression:
    """nextafter of floats of 16 bits, as int32 of their bits, the greatest finite one below `infinity`."""

    def ordered(bits: Expression) -> Expression:
        magnitude = bits & 0x7FFF
        return f.where((bits & 0x8000) != 0, -magnitude, magnitude)

    a, b = ordered(bits), ordered(towards)
    moved = a + f.where(b > a, f.full_like(a, 1), -1)
    # Between the zeros there is no step: from zero the sign is that of the direction.
    result = f.where(moved < 0, -moved | 0x8000, f.where((moved == 0) & (a < 0), f.full_like(a, 0x8000), moved))
    result = f.where(a == b, towards, result)
    nan_a, nan_b = (bits & 0x7FFF) > infinity, (towards & 0x7FFF) > infinity
    return f.where(nan_a, bits, f.where(nan_b, towards, result))


@operator("nextafter")
def nextafter(call: Call, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of the stored dtype, which formulas do not see: float16 and bfloat16 are taken as their bits."""
    (out,) = call.outputs()
    if out.dtype not in (torch.float16, torch.bfloat16):
        run_pointwise(f.nextafter, [out], [self, other], compute=out.dtype, key="nextafter", name="nextafter")
        return out
    infinity = 0x7C00 if out.dtype == torch.float16 else 0x7F80
    inputs = [tensor.to(out.dtype).view(torch.int16) for tensor in (self, other)]

    def formula(a: Expression, b: Expression) -> Expression:
        return _next_bits(a & 0xFFFF, b & 0xFFFF, infinity)

    key = ("nextafter", out.dtype)
    run_pointwise(formula, [out.view(torch.int16)], inputs, compute=torch.int32, key=key, name="nextafter")
    return out


pointwise("frexp.Tensor", frexp)
