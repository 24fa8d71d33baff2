"""Arithmetic: sums, products, quotients, powers, rounding, extrema."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.expression import Formula, Operand, same_dtype
from torch_backplane.kernels.templates.divisors import check_divisors
from torch_backplane.planning import (
    Call,
    Number,
    RunOnCPU,
    check_fits,
    error_words,
    operator,
    plan_pointwise,
    pointwise,
    run_pointwise,
    run_template,
    socket,
)
from torch_backplane.planning.call import elementwise_result
from torch_backplane.planning.declare import check_supported
from torch_backplane.planning.pointwise import Fitting

# Sums and products

pointwise("add.Tensor", lambda a, b, alpha: a + alpha * b, dtypes="complex", fitting="stored")
pointwise("mul.Tensor", lambda a, b: a * b, dtypes="complex")
pointwise("addcmul", lambda a, b, c, value: a + value * b * c, dtypes="complex")
pointwise("addcdiv", lambda a, b, c, value: a + value * b / c, dtypes="complex")
pointwise("neg", lambda a: -a, dtypes="complex")
pointwise("reciprocal", lambda a: 1.0 / a, dtypes="complex")
pointwise(
    "native_dropout_backward",
    lambda grad, mask, scale: grad * (mask.to(grad.dtype) * scale),
    passed_through=["scale"],
)


pointwise("lerp.Scalar", f.lerp, dtypes="complex")
pointwise("lerp.Tensor", f.lerp, dtypes="complex")


def difference(call: Call, a: Any, b: Any, alpha: Any) -> torch.Tensor:
    if any(one.dtype == torch.bool for one in (a, b)):
        raise RunOnCPU("differences of bools")  # which refuses them
    return plan_pointwise("sub", lambda a, b, alpha: a - alpha * b, call, (a, b, alpha), fitting="stored")


@operator("sub.Tensor", dtypes="complex")
def sub(call: Call, self: Any, other: Any, alpha: Any) -> torch.Tensor:
    return difference(call, self, other, alpha)


@operator("rsub.Tensor", dtypes="complex")
def rsub(call: Call, self: Any, other: Any, alpha: Any) -> torch.Tensor:
    if isinstance(alpha, _C.Number) and alpha.dtype == torch.bool:
        raise RunOnCPU("a bool for alpha")  # which refuses it; sub's meta function does, too
    tensors = [one for one in (other, self) if isinstance(one, torch.Tensor)]  # in the order of the difference
    (result,) = call.meta(call.functional)
    call.outputs(like=[elementwise_result(tensors, result.dtype)], elementwise=True)
    return difference(call, other, self, alpha)


# Quotients and remainders


def rounded(number: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A number as a tensor of float16 or bfloat16, for operators in which PyTorch makes it one before it computes."""
    if not isinstance(number, Number) or dtype not in (torch.float16, torch.bfloat16):
        return number
    tensor = torch.empty((), dtype=dtype, device=device)
    run_pointwise(lambda x: x, [tensor], [], [(number, value_dtype(dtype))], key="value", name="value")
    return tensor


def divide(a: Expression, b: Expression, rounding_mode: str | None) -> Expression:
    if rounding_mode is None:
        return a / b
    return f.trunc_divide(a, b) if rounding_mode == "trunc" else f.floor_divide(a, b)


pointwise("div.Tensor", lambda a, b: a / b, dtypes="complex")


def quotient(name: str, formula: Formula, fitting: Fitting = "computed") -> None:
    """A pointwise operator whose second argument divides; of integers, zeros among the divisors are an error."""

    @operator(name)
    def plan(call: Call, a: Any, b: Any, *options: Any) -> torch.Tensor:
        socket.check_broadcast([value for value in (a, b) if isinstance(value, torch.Tensor)])
        (result,) = call.meta(call.functional)
        if name == "floor_divide" and call.overload is call.functional:
            # Its meta function is composed of others, which lay a result out otherwise than the iterator does.
            call.outputs(like=call.meta(torch.ops.aten.remainder.Tensor), elementwise=True)
        if not result.dtype.is_floating_point and result.numel():
            # Before the result is written, which may be where the divisor is.
            called, words = name.partition(".")[0], error_words(call.device)
            run_template(check_divisors, call.device, b, result.dtype, words, called, name=called)
        if name in ("remainder.Tensor", "remainder.Scalar_Tensor", "fmod.Tensor"):
            a, b = (rounded(one, result.dtype, call.device) for one in (a, b))
        return plan_pointwise(name, formula, call, (a, b, *options), fitting=fitting)


quotient("div.Tensor_mode", divide)
quotient("floor_divide", f.floor_divide)
quotient("remainder.Tensor", f.remainder)
quotient("remainder.Scalar_Tensor", f.remainder, fitting="any")  # PyTorch makes a tensor of the number
quotient("fmod.Tensor", f.fmod)


def gcd(a: Expression, b: Expression) -> Expression:
    """Of integers only, as PyTorch's."""
    if a.dtype == torch.bool or a.dtype.is_floating_point:
        raise TypeError(f"gcd of {a.dtype}".replace("torch.", ""))
    return f.gcd(a, b)


def lcm(a: Expression, b: Expression) -> Expression:
    divisor = gcd(a, b)
    return f.absolute(f.trunc_divide(a, divisor) * b)


pointwise("gcd", gcd)
pointwise("lcm", lcm)


# Powers and roots

# Exponents that people write, for which a formula is faster and nearer than the power function.
_POWERS: dict[float, Formula] = {
    0: lambda a: f.full_like(a, 1),
    1: lambda a: a,
    2: lambda a: a * a,
    3: lambda a: a * a * a,
    0.5: f.sqrt,
    -0.5: f.rsqrt,
    -1: lambda a: 1.0 / a,
    -2: lambda a: 1.0 / (a * a),
}


def power_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What powers of `dtype` are computed in. complex128 for complex64, if the device has it: the rounding error of
    exp(b log(a)) grows with the exponent.
    """
    if dtype == torch.complex64 and torch.complex128 in _C.device_properties(device.index).dtypes:
        return torch.complex128
    return value_dtype(dtype)


@operator("pow.Tensor_Scalar", by_value=["exponent"], static={"exponent": _POWERS}, dtypes="complex")
def power_of_number(call: Call, self: torch.Tensor, exponent: float) -> torch.Tensor:
    (out,) = call.outputs()
    result = call.meta(call.functional)[0].dtype
    check_supported(result)
    check_fits(result, exponent)
    if result in (torch.float16, torch.bfloat16):
        exponent = torch.tensor(exponent, dtype=result).item()
    dtype = value_dtype(result)
    formula = _POWERS.get(exponent) if dtype.is_floating_point or dtype.is_complex else None
    if formula is None:
        dtype = power_dtype(dtype, out.device)
        run_pointwise(f.power, [out], [self], [(exponent, dtype)], compute=dtype, key="pow", name="pow")
    else:
        run_pointwise(formula, [out], [self], compute=dtype, key=("pow", float(exponent.real)), name="pow")
    return out


@operator("pow.Tensor_Tensor", "pow.Scalar", dtypes="complex")
def power(call: Call, base: Any, exponent: Any) -> torch.Tensor:
    def formula(a: Operand, b: Operand) -> Expression:
        a, b = same_dtype("pow", (a, b))
        if not a.is_complex:
            return f.power(a, b)
        dtype = power_dtype(a.dtype, call.device)
        return f.power(a.to(dtype), b.to(dtype))

    (result,) = call.meta(call.functional)
    if isinstance(base, Number) and not all(torch.can_cast(result.dtype, given.dtype) for given in call.written):
        raise RunOnCPU("a result of another dtype")  # which is filled where the base is 1, and refused otherwise
    base, exponent = (rounded(one, result.dtype, call.device) for one in (base, exponent))
    return plan_pointwise("pow", formula, call, (base, exponent), fitting="any")


pointwise("sqrt", f.sqrt, dtypes="complex")
pointwise("rsqrt", f.rsqrt, dtypes="complex")
pointwise("hypot", f.hypot)


def scaled(a: Expression, exponent: Expression) -> Expression:
    """By half of the exponent twice: a power may be beyond the dtype where the result is not."""
    half = f.trunc(exponent / 2.0)
    return a * f.exp2(half) * f.exp2(exponent - half)


@operator("ldexp.Tensor", dtypes="complex")
def ldexp(call: Call, self: Any, other: torch.Tensor) -> torch.Tensor:
    """Exact by whole exponents; by others as PyTorch composes it of operators, where the power has its own dtype."""
    if self.dtype.is_floating_point and not (other.is_floating_point() or other.is_complex()):
        return plan_pointwise("ldexp", scaled, call, (self, other))
    if self.dtype == torch.float64 or self.dtype.is_complex:  # a tensor without dimensions of this dtype is the base
        other = other.to(torch.result_type(torch.empty((), dtype=self.dtype, device="meta"), other))
        check_supported(other.dtype)
    power = torch.pow(2.0, other)
    tensors = [one for one in (self, power) if isinstance(one, torch.Tensor)]
    dtype = torch.result_type(self.example if isinstance(self, Number) else self, power)
    call.outputs(like=[elementwise_result(tensors, dtype)], elementwise=True)
    return plan_pointwise("ldexp by a power", lambda a, b: a * b, call, (self, power))


# Sign and magnitude


def absolute(a: Expression) -> Expression:
    return a if a.dtype == torch.bool else f.absolute(a)


def heaviside(a: Expression, at_zero: Expression) -> Expression:
    return f.where(a == full(a, 0), at_zero, (a > full(a, 0)).to(a.dtype))


def full(a: Expression, value: int) -> Expression:
    """A number as a's dtype, which may be bool."""
    return f.full_like(a, bool(value) if a.dtype == torch.bool else value)


pointwise("abs", absolute, dtypes="complex")
pointwise("sign", f.sign)
pointwise("sgn", f.sign, dtypes="complex")
pointwise("heaviside", heaviside)


@operator("angle", dtypes="complex")
def angle(call: Call, self: torch.Tensor) -> torch.Tensor:
    """The real angles of complex numbers are contiguous, in PyTorch."""
    if self.is_complex() and not any(given.is_complex() for given in call.written):
        call.outputs(elementwise=True, contiguous=True)
    return plan_pointwise("angle", f.angle, call, (self,))


@operator("copysign.Tensor")
def copysign(call: Call, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of tensors of the device alone, other than pointwise operators: its meta kernel refuses those of the CPU."""
    return plan_pointwise("copysign.Tensor", f.copysign, call, (self, other))


# Rounding; integers are whole already


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


# Extrema


def fmin(a: Expression, b: Expression) -> Expression:
    return f.fmin(a, b) if f.is_float(a) else f.minimum(a, b)


def fmax(a: Expression, b: Expression) -> Expression:
    return f.fmax(a, b) if f.is_float(a) else f.maximum(a, b)


def clamp(a: Expression, least: Operand | None, greatest: Operand | None) -> Expression:
    if least is not None:
        a = f.maximum(a, least)
    return a if greatest is None else f.minimum(a, greatest)


pointwise("minimum", f.minimum)
pointwise("maximum", f.maximum)
pointwise("fmin", fmin)
pointwise("fmax", fmax)
pointwise("clamp", clamp, fitting="stored")
pointwise("clamp.Tensor", clamp)
pointwise("clamp_min", f.maximum, fitting="stored")
pointwise("clamp_min.Tensor", f.maximum)
pointwise("clamp_max", f.minimum, fitting="stored")
pointwise("clamp_max.Tensor", f.minimum)
