"""Elementwise operators of two and three tensors: arithmetic, bits, comparisons, extrema and special functions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.kernels import Expression, special
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.expression import Formula
from torch_backplane.kernels.templates.divisors import check_divisors
from torch_backplane.operators.unary_ops import ends
from torch_backplane.planning import (
    Call,
    Number,
    Refused,
    error_words,
    operator,
    plan_pointwise,
    pointwise,
    run_pointwise,
    run_template,
    runtime,
)
from torch_backplane.planning.call import elementwise_result
from torch_backplane.planning.declare import check_supported
from torch_backplane.planning.pointwise import Fitting

# Sums and products

pointwise("add.Tensor", lambda a, b, alpha: a + alpha * b, dtypes="complex", fitting="stored")
pointwise("mul.Tensor", lambda a, b: a * b, dtypes="complex")


def difference(call: Call, a: Any, b: Any, alpha: Any) -> torch.Tensor:
    if any(one.dtype == torch.bool for one in (a, b)):
        raise Refused("subtraction of bools")
    return plan_pointwise("sub", lambda a, b, alpha: a - alpha * b, call, (a, b, alpha), fitting="stored")


@operator("sub.Tensor", dtypes="complex")
def sub(call: Call, self: Any, other: Any, alpha: Any) -> torch.Tensor:
    return difference(call, self, other, alpha)


@operator("rsub.Tensor", dtypes="complex")
def rsub(call: Call, self: Any, other: Any, alpha: Any) -> torch.Tensor:
    if isinstance(alpha, _C.Number) and alpha.dtype == torch.bool:
        raise Refused("alpha is a bool")  # sub's meta function refuses it, too
    tensors = [one for one in (other, self) if isinstance(one, torch.Tensor)]  # in the order of other - self
    (result,) = call.meta(call.functional)
    call.outputs(like=[elementwise_result(tensors, result.dtype)], elementwise=True)
    return difference(call, other, self, alpha)


def add_relu(a: Expression, b: Expression, alpha: Expression) -> Expression:
    """The sum, clamped to zero and, as in PyTorch, to the largest finite number."""
    total = a + alpha * b
    if not f.is_float(total):
        return f.maximum(total, 0)
    return f.clamp(total, 0.0, torch.finfo(total.dtype).max)


def _check_add_relu(*dtypes: torch.dtype) -> None:
    if any((dtype.itemsize == 2 and dtype.is_floating_point) or dtype == torch.bool for dtype in dtypes):
        raise Refused("_add_relu of float16, bfloat16 or bool")


@operator("_add_relu.Tensor")
def add_relu_tensor(call: Call, self: torch.Tensor, other: torch.Tensor, alpha: Any) -> torch.Tensor:
    _check_add_relu(torch.result_type(self, other))
    call.outputs(like=call.meta(call.functional))  # the out= variant has no meta kernel
    return plan_pointwise("_add_relu", add_relu, call, (self, other, alpha))


@operator("_add_relu.Scalar")
def add_relu_number(call: Call, self: torch.Tensor, other: Number, alpha: Number) -> torch.Tensor:
    _check_add_relu(self.dtype)
    if not self.is_floating_point() and (other.dtype.is_floating_point or alpha.dtype.is_floating_point):
        raise Refused("a floating-point number with an integer tensor")
    (out,) = call.outputs(like=[torch.empty_like(self, device="meta")])
    dtype = value_dtype(self.dtype)
    scalars = [(other, dtype), (alpha.fitting(self.dtype), dtype)]  # PyTorch makes `other` a tensor, unchecked
    run_pointwise(add_relu, [out], [self], scalars, key="_add_relu", name="add_relu")
    return out


# Quotients and remainders


def rounded(number: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Rounds a number to float16 or bfloat16 by storing it, as PyTorch does before it computes some operators."""
    if not isinstance(number, Number) or dtype not in (torch.float16, torch.bfloat16):
        return number
    tensor = torch.empty((), dtype=dtype, device=device)
    run_pointwise(lambda x: x, [tensor], [], [(number, value_dtype(dtype))], key="value", name="value")
    return tensor


def divide(
    a: Expression, b: Expression, rounding_mode: str | None = "floor", stored: torch.dtype = torch.float32
) -> Expression:
    """The quotient. If `stored` is float16 or bfloat16, each step is rounded to it, as in PyTorch for two tensors."""
    if rounding_mode is None:
        return a / b
    return (f.trunc_divide_in_steps if rounding_mode == "trunc" else f.floor_divide_in_steps)(a, b, stored)


pointwise("div.Tensor", lambda a, b: a / b, dtypes="complex")


def quotient(name: str, formula: Formula, fitting: Fitting = "computed") -> None:
    """Declares a pointwise operator that divides by its second argument. An integer divisor of zero is an error."""

    @operator(name)
    def plan(call: Call, a: Any, b: Any, *options: Any) -> torch.Tensor:
        runtime.check_broadcast([value for value in (a, b) if isinstance(value, torch.Tensor)])
        (result,) = call.meta(call.functional)
        if result.dtype.is_complex:
            raise Refused("rounding division of complex numbers")
        if name == "floor_divide" and call.overload is call.functional:
            # Its meta function is a composition that gives other strides than TensorIterator.
            call.outputs(like=call.meta(torch.ops.aten.remainder.Tensor), elementwise=True)
        if not result.dtype.is_floating_point and result.numel():
            # Checked before the result is written, which can overwrite the divisor.
            called, words = name.partition(".")[0], error_words(call.device)
            run_template(check_divisors, call.device, b, result.dtype, words, called, name=called)
        a = rounded(a, result.dtype, call.device)
        if formula is not divide:
            b = rounded(b, result.dtype, call.device)
        elif isinstance(b, torch.Tensor) and result.dtype in (torch.float16, torch.bfloat16):
            in_steps = partial(divide, stored=result.dtype)
            return plan_pointwise(f"{name} in steps", in_steps, call, (a, b, *options), fitting=fitting)
        return plan_pointwise(name, formula, call, (a, b, *options), fitting=fitting)


quotient("div.Tensor_mode", divide)
quotient("floor_divide", divide)
quotient("remainder.Tensor", f.remainder)
quotient("remainder.Scalar_Tensor", f.remainder, fitting="any")  # PyTorch converts the number to a tensor
quotient("fmod.Tensor", f.fmod)


def gcd(a: Expression, b: Expression) -> Expression:
    """Greatest common divisor, of integers only as in PyTorch."""
    if a.dtype == torch.bool or a.dtype.is_floating_point:
        raise TypeError(f"gcd of {a.dtype}".replace("torch.", ""))
    return f.gcd(a, b)


def lcm(a: Expression, b: Expression) -> Expression:
    """Least common multiple, in C's int at least: as in PyTorch, narrower dtypes wrap after the absolute value."""
    wide = torch.int32 if a.dtype.itemsize < 4 else a.dtype
    return f.absolute(f.trunc_divide(a, gcd(a, b)).to(wide) * b.to(wide)).to(a.dtype)


pointwise("gcd", gcd)
pointwise("lcm", lcm)


# Signs, exponents and adjacent numbers


def heaviside(a: Expression, at_zero: Expression) -> Expression:
    return f.where(a == full(a, 0), at_zero, (a > full(a, 0)).to(a.dtype))


def full(a: Expression, value: int) -> Expression:
    """A constant of a's dtype, which can be bool."""
    return f.full_like(a, bool(value) if a.dtype == torch.bool else value)


pointwise("heaviside", heaviside)


@operator("copysign.Tensor")
def copysign(call: Call, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Takes device tensors only, unlike pointwise operators: the meta kernel rejects zero-dimensional CPU tensors."""
    return plan_pointwise("copysign.Tensor", f.copysign, call, (self, other))


pointwise("hypot", f.hypot)


def scaled(a: Expression, exponent: Expression) -> Expression:
    """a · 2^exponent, rounded once. As in PyTorch's kernels, the exponent is C's int, and wider exponents wrap."""
    wide = a.dtype == torch.float64
    digits, greatest, bits = (52, 1023, torch.int64) if wide else (23, 127, torch.int32)
    fraction = 1 << digits
    # Splits a into a significand in [1, 2) with a's sign, and an exponent. Subnormal numbers are scaled up first.
    small = f.absolute(a) < 2.0 ** (1 - greatest)
    normal = f.where(small, a * float(fraction), a)
    pattern = normal.view(bits)
    own = ((pattern >> digits) & (2 * greatest + 1)) - greatest
    own = f.where(small, own - digits, own)
    significand = ((pattern & ~((2 * greatest + 1) << digits)) | (greatest << digits)).view(a.dtype)
    # Multiplies in two steps, of which the first is exact. At the bounds of the exponent, results are 0 or infinite.
    asked = exponent.to(torch.int32)
    if exponent.dtype.itemsize >= 4:
        # Clamped, because the sum of two exponents can overflow int32. Narrower exponents need no clamp, and LLVM 15,
        # which Mesa uses, miscompiles a clamp of an int8 that was converted to int32, or aborts the process.
        asked = f.maximum(f.minimum(asked, 4 * greatest), -4 * greatest)
    asked = asked.to(bits)
    total = f.maximum(f.minimum(own + asked, 2 * greatest), -greatest - digits - 3)
    first = f.maximum(f.minimum(total, greatest), 1 - greatest)

    def power(of: Expression) -> Expression:
        return ((of + greatest) << digits).view(a.dtype)

    result = significand * power(first) * power(total - first)
    return f.where((a == 0.0) | ~f.isfinite(a), a, result)


@operator("ldexp.Tensor", dtypes="complex")
def ldexp(call: Call, self: Any, other: torch.Tensor) -> torch.Tensor:
    """Exact for integer exponents. Others follow PyTorch's composition, in which the power has its own dtype."""
    if self.dtype.is_floating_point and not (other.is_floating_point() or other.is_complex()):
        return plan_pointwise("ldexp", scaled, call, (self, other), compute="inputs")
    if self.dtype == torch.float64 or self.dtype.is_complex:  # PyTorch's base 2 is a 0-dim tensor of this dtype
        other = other.to(torch.result_type(torch.empty((), dtype=self.dtype, device="meta"), other))
        check_supported(other.dtype)
    power = torch.pow(2.0, other)
    tensors = [one for one in (self, power) if isinstance(one, torch.Tensor)]
    dtype = torch.result_type(self.example if isinstance(self, Number) else self, power)
    call.outputs(like=[elementwise_result(tensors, dtype)], elementwise=True)
    return plan_pointwise("ldexp by a power", lambda a, b: a * b, call, (self, power))


def _next_bits(bits: Expression, towards: Expression, infinity: int) -> Expression:
    """nextafter of 16-bit floats as bit patterns in int32; `infinity` is the bit pattern of infinity."""

    def ordered(bits: Expression) -> Expression:
        magnitude = bits & 0x7FFF
        return f.where((bits & 0x8000) != 0, -magnitude, magnitude)

    a, b = ordered(bits), ordered(towards)
    moved = a + f.where(b > a, f.full_like(a, 1), -1)
    # Both zeros are one position: a step from zero takes the sign of its direction, a step up to zero gives -0.
    result = f.where(moved < 0, -moved | 0x8000, f.where((moved == 0) & (a < 0), f.full_like(a, 0x8000), moved))
    result = f.where(a == b, towards, result)
    nan_a, nan_b = (bits & 0x7FFF) > infinity, (towards & 0x7FFF) > infinity
    return f.where(nan_a, bits, f.where(nan_b, towards, result))


@operator("nextafter")
def nextafter(call: Call, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The next number of the stored dtype. Formulas see float16 and bfloat16 as float32, so they are passed as bits."""
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


# Extrema


def fmin(a: Expression, b: Expression) -> Expression:
    return f.fmin(a, b) if f.is_float(a) else f.minimum(a, b)


def fmax(a: Expression, b: Expression) -> Expression:
    return f.fmax(a, b) if f.is_float(a) else f.maximum(a, b)


pointwise("minimum", f.minimum)
pointwise("maximum", f.maximum)
pointwise("fmin", fmin)
pointwise("fmax", fmax)


# Bits

pointwise("bitwise_and.Tensor", lambda a, b: a & b)
pointwise("bitwise_or.Tensor", lambda a, b: a | b)
pointwise("bitwise_xor.Tensor", lambda a, b: a ^ b)
pointwise("bitwise_left_shift.Tensor", lambda a, b: a << b)
pointwise("bitwise_right_shift.Tensor", lambda a, b: a >> b)

# Python's operators <<, >>, <<= and >>=.
for overload in ("Tensor", "Scalar"):
    for name in ("__lshift__", "__ilshift__"):
        pointwise(f"{name}.{overload}", lambda a, b: a << b, fitting="any")
    for name in ("__rshift__", "__irshift__"):
        pointwise(f"{name}.{overload}", lambda a, b: a >> b, fitting="any")


# Comparisons and logic

for overload in ("Tensor", "Scalar"):
    pointwise(f"eq.{overload}", lambda a, b: a == b, dtypes="complex", fitting="any")
    pointwise(f"ne.{overload}", lambda a, b: a != b, dtypes="complex", fitting="any")
    pointwise(f"lt.{overload}", lambda a, b: a < b, fitting="any")
    pointwise(f"le.{overload}", lambda a, b: a <= b, fitting="any")
    pointwise(f"gt.{overload}", lambda a, b: a > b, fitting="any")
    pointwise(f"ge.{overload}", lambda a, b: a >= b, fitting="any")

pointwise("logical_and", lambda a, b: a.to(torch.bool) & b.to(torch.bool), dtypes="complex")
pointwise("logical_or", lambda a, b: a.to(torch.bool) | b.to(torch.bool), dtypes="complex")
pointwise("logical_xor", lambda a, b: a.to(torch.bool) ^ b.to(torch.bool), dtypes="complex")


# Logarithms and special functions

pointwise("atan2", f.atan2)


def logaddexp(a: Expression, b: Expression) -> Expression:
    same = f.isinf(a) & (a == b)
    return f.where(same, a, f.maximum(a, b) + f.log1p(f.exp(-f.absolute(a - b))))


def logaddexp2(a: Expression, b: Expression) -> Expression:
    same = f.isinf(a) & (a == b)
    return f.where(same, a, f.maximum(a, b) + f.log1p(f.exp2(-f.absolute(a - b))) * (1.0 / math.log(2.0)))


def _zero_unless_nan(a: Expression, b: Expression, product: Expression) -> Expression:
    return f.where(f.isnan(b), b, f.where(a == 0.0, 0.0, product))


pointwise("logaddexp", logaddexp)
pointwise("logaddexp2", logaddexp2)
pointwise("xlogy.Tensor", lambda a, b: _zero_unless_nan(a, b, a * f.log(b)))
pointwise("special_xlog1py", lambda a, b: _zero_unless_nan(a, b, a * f.log1p(b)))
pointwise("special_zeta", special.zeta)
pointwise("igamma", special.gammainc)
pointwise("igammac", special.gammaincc)

for kind, (polynomial, steps) in {
    "t": (special.chebyshev_t, 6),
    "u": (special.chebyshev_u, 6),
    "v": (special.chebyshev_v, 6),
    "w": (special.chebyshev_w, 4),
}.items():
    pointwise(f"special_chebyshev_polynomial_{kind}", polynomial)
    pointwise(
        f"special_shifted_chebyshev_polynomial_{kind}",
        lambda x, n, polynomial=polynomial, steps=steps: polynomial(2.0 * x - 1.0, n, steps=steps),
    )

pointwise("special_hermite_polynomial_h", special.hermite_h)
pointwise("special_hermite_polynomial_he", special.hermite_he)
pointwise("special_laguerre_polynomial_l", special.laguerre_l)
pointwise("special_legendre_polynomial_p", special.legendre_p)


# Gradients of unary functions

pointwise("sigmoid_backward", lambda grad, result: grad * f.conj(1.0 - result) * f.conj(result), dtypes="complex")
pointwise("tanh_backward", lambda grad, result: grad * f.conj(1.0 - result * result), dtypes="complex")


def _logit_backward(grad: Expression, a: Expression, *ends: Expression) -> Expression:
    slope = grad / (a * (1.0 - a))
    if ends:
        first, last = ends
        return f.where((a >= first) & (a <= last), slope, 0.0)
    return f.where((a < 0.0) | (a > 1.0), math.nan, slope)


@operator("logit_backward")
def logit_backward(call: Call, grad_output: torch.Tensor, self: torch.Tensor, eps: float | None) -> torch.Tensor:
    return plan_pointwise("logit_backward", _logit_backward, call, (grad_output, self, *ends(eps)))


# Operators of three tensors

pointwise("addcmul", lambda a, b, c, value: a + value * b * c, dtypes="complex")
pointwise("addcdiv", lambda a, b, c, value: a + value * b / c, dtypes="complex")
pointwise("lerp.Scalar", f.lerp, dtypes="complex")
pointwise("lerp.Tensor", f.lerp, dtypes="complex")
