"""Activation functions and their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_backplane.kernels import Expression, special
from torch_backplane.kernels import functions as f
from torch_backplane.planning import Call, Refused, check_same_dtype, operator, pointwise, run_pointwise
from torch_backplane.planning.pointwise import type_name

# Piecewise linear functions. Comparisons are written so that NaN gives the result of PyTorch's CUDA kernels.

pointwise("relu", lambda a: f.maximum(a, 0))
# Idempotent: PyTorch allows it in place on expanded tensors.
pointwise(
    "threshold",
    lambda a, threshold, value: f.where(a <= threshold, value, a),
    fitting={"threshold": "computed", "value": "stored"},
    idempotent=True,
)
pointwise("threshold_backward", lambda grad, a, threshold: f.where(a <= threshold, 0, grad))
pointwise("leaky_relu", lambda a, slope: f.where(a > 0.0, a, a * slope))
pointwise(
    "leaky_relu_backward",
    lambda grad, a, slope, self_is_result: f.where(a > 0.0, grad, grad * slope),
    checks=["negative_slope >= 0 if self_is_result"],  # otherwise the result does not show the sign of the input
)
pointwise("_prelu_kernel", lambda a, weight: f.where(a > 0.0, a, weight * a), one_dtype=["self", "weight"])
pointwise(
    "_prelu_kernel_backward",
    lambda grad, a, weight: (f.where(a > 0.0, grad, weight * grad), f.where(a > 0.0, 0.0, a * grad)),
    one_dtype=["grad_output", "self", "weight"],
)
pointwise(
    "hardtanh",
    lambda a, least, greatest: f.minimum(f.maximum(a, least), greatest),
    fitting="stored",
    checks=["min_val >= lowest(self)", "max_val >= lowest(self)"],  # rejects negative limits of unsigned integers
)
pointwise("hardtanh_backward", lambda grad, a, least, greatest: f.where((a <= least) | (a >= greatest), 0.0, grad))


def _relu6_of_shifted(a: Expression) -> Expression:
    return f.minimum(f.maximum(a + 3.0, 0.0), 6.0)


pointwise("hardsigmoid", lambda a: _relu6_of_shifted(a) / 6.0)
pointwise("hardsigmoid_backward", lambda grad, a: f.where((a > -3.0) & (a < 3.0), grad * (1.0 / 6.0), 0.0))
pointwise("hardswish", lambda a: a * _relu6_of_shifted(a) / 6.0)
pointwise(
    "hardswish_backward",
    lambda grad, a: f.where(a <= -3.0, 0.0, f.where(a < 3.0, grad * (a / 3.0 + 0.5), grad)),
)


def softshrink(a: Expression, lambd: Expression) -> Expression:
    return f.where(a > lambd, a - lambd, f.where(a < -lambd, a + lambd, f.where(f.isnan(a), a, 0.0)))


def shrink_backward(grad: Expression, a: Expression, lambd: Expression) -> Expression:
    return f.where((a >= -lambd) & (a <= lambd), 0.0, grad)


pointwise("hardshrink", lambda a, lambd: f.where((a >= -lambd) & (a <= lambd), 0.0, a), fitting="stored")
pointwise("hardshrink_backward", shrink_backward, fitting="stored")
pointwise("softshrink", softshrink, fitting="stored", checks=["lambd >= 0", "lambd <= finite(self)"])
pointwise("softshrink_backward", shrink_backward, fitting="stored")


# Functions of exponentials


def elu(a: Expression, alpha: Expression, scale: Expression, input_scale: Expression) -> Expression:
    return f.where(a < 0.0, f.expm1(a * input_scale) * (alpha * scale), a * scale)


def elu_backward(
    grad: Expression,
    alpha: Expression,
    scale: Expression,
    input_scale: Expression,
    is_result: bool,
    a: Expression,
) -> Expression:
    if is_result:
        falling = grad * input_scale * (a + alpha * scale)
    else:
        falling = grad * input_scale * (alpha * scale) * f.exp(a * input_scale)
    return f.where(a <= 0.0, falling, grad * scale)


def softplus(a: Expression, beta: Expression, threshold: Expression) -> Expression:
    return f.where(a * beta > threshold, a, f.log1p(f.exp(a * beta)) / beta)


def softplus_backward(grad: Expression, a: Expression, beta: Expression, threshold: Expression) -> Expression:
    power = f.exp(a * beta)
    return f.where(a * beta > threshold, grad, grad * power / (power + 1.0))


def log_sigmoid(a: Expression) -> tuple[Expression, Expression]:
    """The result, and the buffer for the backward function. The exponential cannot overflow."""
    buffer = f.exp(-f.absolute(a))
    return f.minimum(a, 0.0) - f.log1p(buffer), buffer


def log_sigmoid_backward(grad: Expression, a: Expression, buffer: Expression) -> Expression:
    rest = buffer / (1.0 + buffer)
    return grad * f.where(a < 0.0, 1.0 - rest, rest)


def _mish_gate(a: Expression) -> tuple[Expression, Expression]:
    """tanh(softplus(a)) and 1 minus its square, computed from one exponential without cancellation."""
    power = f.exp(a)
    n = power * (power + 2.0)
    gate = f.where(a > 20.0, 1.0, n / (n + 2.0))
    return gate, 2.0 / (n + 2.0) * (1.0 + gate)


def mish_backward(grad: Expression, a: Expression) -> Expression:
    gate, rest = _mish_gate(a)
    return grad * (gate + a * f.sigmoid(a) * rest)


pointwise("elu", elu)
pointwise("elu_backward", elu_backward, checks=["alpha >= 0 if is_result"])
pointwise("softplus", softplus)
pointwise("softplus_backward", softplus_backward)
pointwise("log_sigmoid_forward", log_sigmoid)
pointwise("log_sigmoid_backward", log_sigmoid_backward, one_dtype=["grad_output", "self", "buffer"])
pointwise("silu", lambda a: a / (1.0 + f.exp(-a)), dtypes="complex")
pointwise("silu_backward", lambda grad, a: grad * f.sigmoid(a) * (1.0 + a * (1.0 - f.sigmoid(a))))
pointwise("mish", lambda a: a * _mish_gate(a)[0])
pointwise("mish_backward", mish_backward, one_dtype=["grad_output", "self"])

# GELU

_TANH_SCALE = math.sqrt(2.0 / math.pi)
_TANH_CUBIC = 0.044715


def _check_approximation(approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise Refused("approximate is neither 'none' nor 'tanh'")


def gelu(a: Expression, approximate: str) -> Expression:
    _check_approximation(approximate)
    if approximate == "tanh":
        return 0.5 * a * (1.0 + f.tanh(_TANH_SCALE * (a + _TANH_CUBIC * a * a * a)))
    return a * special.normal_distribution(a)


def gelu_backward(grad: Expression, a: Expression, approximate: str) -> Expression:
    _check_approximation(approximate)
    if approximate == "tanh":
        tanh = f.tanh(_TANH_SCALE * (a + _TANH_CUBIC * a * a * a))
        slope = _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBIC * a * a)
        return grad * (0.5 * (1.0 + tanh) + 0.5 * a * (1.0 - tanh * tanh) * slope)
    density = f.exp(-0.5 * a * a) * (1.0 / math.sqrt(2.0 * math.pi))
    return grad * (special.normal_distribution(a) + a * density)


pointwise("gelu", gelu)
pointwise("gelu_backward", gelu_backward)


# Random


@operator("rrelu_with_noise", by_value=["lower", "upper"])
def rrelu_with_noise(
    call: Call, self: torch.Tensor, noise: torch.Tensor, lower: float, upper: float, training: bool, generator: Any
) -> torch.Tensor:
    """Draws a slope for each element that is not positive; other elements have slope 1. Writes the slopes to `noise`.

    Without training, it is a leaky ReLU with the mean slope.
    """
    if not self.is_floating_point():
        raise Refused("self is not floating-point")
    if noise.shape != self.shape:
        raise Refused("noise has another shape than self")
    if not training:
        check_same_dtype(call, self.dtype)
    # PyTorch's kernel writes numbers of self's dtype to both.
    for given in (*call.written, noise) if training else ():
        if given.dtype != self.dtype:
            raise RuntimeError(f"expected scalar type {type_name(self.dtype)} but found {type_name(given.dtype)}")
    if training and not (lower <= upper and math.isfinite(upper - lower)):
        raise Refused("lower and upper are not a finite range")
    (out,) = call.outputs(like=[torch.empty(self.shape, dtype=self.dtype, device="meta")])
    if not training:
        return torch.ops.aten.leaky_relu.out(self, (lower + upper) / 2, out=out)
    drawn = torch.empty(self.shape, dtype=self.dtype, device=self.device).uniform_(lower, upper, generator=generator)

    def formula(a: Expression, drawn: Expression) -> tuple[Expression, Expression]:
        slope = f.where(a <= 0.0, drawn, 1.0)
        return a * slope, slope

    run_pointwise(formula, [out, noise], [self, drawn], key="rrelu_with_noise", name="rrelu_with_noise")
    return out
