"""Elementwise losses and their gradients.

Each loss is a formula. `reduction` is PyTorch's number: 0 for none, 1 for the mean and 2 for the sum. The kernel of the
loss also computes the mean or sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.expression import Formula
from torch_backplane.kernels.reductions import summation
from torch_backplane.kernels.templates.values import UNIT_INTERVAL
from torch_backplane.planning import (
    Call,
    Refused,
    check,
    check_same_dtype,
    expect_values,
    operator,
    run_pointwise,
    run_reduction,
    runtime,
)
from torch_backplane.planning.call import elementwise_result
from torch_backplane.planning.geometry import check_shape

NONE, MEAN, SUM = range(3)


def loss(
    call: Call, formula: Formula, *inputs: torch.Tensor | None, reduction: int, numbers: Sequence[float] = ()
) -> torch.Tensor:
    """The reduced loss. `formula` takes an element of each input that is not None, and then the `numbers`."""
    (out,) = call.outputs()
    write_loss(call, out, formula, *inputs, reduction=reduction, numbers=numbers)
    return out


def write_loss(
    call: Call,
    out: torch.Tensor,
    formula: Formula,
    *inputs: torch.Tensor | None,
    reduction: int,
    numbers: Sequence[float] = (),
) -> None:
    """Writes the loss to `out`; for operators with several results."""
    tensors = torch.broadcast_tensors(*(tensor for tensor in inputs if tensor is not None))
    name, dtype = call.functional._schema.name.partition("::")[2], value_dtype(out.dtype)
    _check_numbers(numbers, dtype)
    if dtype == torch.bool:
        raise Refused("a loss of bools")
    key = (name, reduction, tuple(tensor is None for tensor in inputs))
    if reduction == NONE:
        scalars = [(number, dtype) for number in numbers]
        run_pointwise(formula, [out], tensors, scalars, compute=dtype, key=key, name=name)
        return
    count = len(tensors)

    def start(*values: Expression) -> Any:
        return formula(*values[:count], *values[count + 1 :])  # without the position

    def finish(total: Expression, count: Expression, *_: Expression) -> Expression:
        return total / count.to(dtype) if reduction == MEAN else total

    summed = summation(dtype, start, finish, [dtype] * len(numbers))
    flat = [tensor.view(1) if tensor.dim() == 0 else tensor for tensor in tensors]
    run_reduction(summed, [out], flat, range(flat[0].dim()), numbers, compute=dtype, key=key, name=name)


def _check_numbers(numbers: Sequence[float], dtype: torch.dtype) -> None:
    if numbers and not dtype.is_floating_point:
        raise Refused("a floating-point number with integer tensors")


def loss_backward(
    call: Call,
    formula: Formula,
    grad: torch.Tensor,
    *inputs: torch.Tensor | None,
    reduction: int,
    numbers: Sequence[float] = (),
    contiguous: bool = False,
) -> torch.Tensor:
    """`grad` times the slope that `formula` computes from an element of each input and the `numbers`. For a mean, it is
    divided by the number of elements.

    Args:
        contiguous: A new result is contiguous, whatever the strides of the inputs are.
    """
    if any(one is not None and one.dtype == torch.bool for one in inputs):
        raise Refused("a gradient of bools")
    (out,) = call.outputs(elementwise=True, contiguous=contiguous and not call.written)
    name, dtype = call.functional._schema.name.partition("::")[2], value_dtype(out.dtype)
    _check_numbers(numbers, dtype)
    share = 1.0 / max(1, out.numel()) if reduction == MEAN else 1.0
    run_pointwise(
        lambda grad, *a: grad * formula(*a[:-1]) * a[-1],
        [out],
        [grad, *(tensor for tensor in inputs if tensor is not None)],
        [(number, dtype) for number in (*numbers, share)],
        compute=dtype,
        key=(name, tuple(tensor is None for tensor in inputs)),
        name=name,
    )
    return out


# Squared losses, and losses that are squared only near zero


def _squared(a: Expression, b: Expression) -> Expression:
    return (a - b) * (a - b)


def _smooth_l1(a: Expression, b: Expression, beta: Expression, divisor: Expression) -> Expression:
    """`divisor` is beta, or 1 if beta is 0."""
    z = f.absolute(a - b)
    return f.where(z < beta, 0.5 * z * z / divisor, z - 0.5 * beta)


def _smooth_l1_slope(a: Expression, b: Expression, beta: Expression, divisor: Expression) -> Expression:
    x = a - b
    return f.where(x <= -beta, -1.0, f.where(x >= beta, 1.0, x / divisor))


def _huber(a: Expression, b: Expression, delta: Expression) -> Expression:
    z = f.absolute(a - b)
    return f.where(z <= delta, 0.5 * z * z, delta * (z - 0.5 * delta))


def _huber_slope(a: Expression, b: Expression, delta: Expression) -> Expression:
    x = a - b
    return f.where(x <= -delta, -delta, f.where(x >= delta, delta, x))


def _of_selfs_dtype(
    call: Call, grad: torch.Tensor, self: torch.Tensor, target: torch.Tensor, contiguous: bool = False
) -> None:
    """Makes the gradient a tensor of self's dtype, as in PyTorch."""
    computed = torch.promote_types(torch.result_type(self, target), torch.result_type(self, grad))
    if not torch.can_cast(computed, self.dtype):
        raise Refused("the product cannot be cast to self's dtype")
    like = elementwise_result([self, target], self.dtype)
    whole = contiguous and not call.written
    call.outputs(like=[like.new_empty(like.shape) if whole else like], elementwise=True)


@operator("mse_loss")
def mse_loss(call: Call, self: torch.Tensor, target: torch.Tensor, reduction: int) -> torch.Tensor:
    check(torch.result_type(self, target).is_floating_point, "self and target do not promote to a floating-point dtype")
    return loss(call, _squared, self, target, reduction=reduction)


@operator("mse_loss_backward")
def mse_loss_backward(
    call: Call, grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    _of_selfs_dtype(call, grad_output, self, target, contiguous=True)
    return loss_backward(
        call, lambda a, b: 2.0 * (a - b), grad_output, self, target, reduction=reduction, contiguous=True
    )


@operator("smooth_l1_loss")
def smooth_l1_loss(call: Call, self: torch.Tensor, target: torch.Tensor, reduction: int, beta: float) -> torch.Tensor:
    return loss(call, _smooth_l1, self, target, reduction=reduction, numbers=(beta, beta or 1.0))


@operator("smooth_l1_loss_backward")
def smooth_l1_loss_backward(
    call: Call, grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    slope, numbers = _smooth_l1_slope, (beta, beta or 1.0)
    _of_selfs_dtype(call, grad_output, self, target, contiguous=True)
    return loss_backward(call, slope, grad_output, self, target, reduction=reduction, numbers=numbers, contiguous=True)


@operator("huber_loss", checks=["delta > 0"])
def huber_loss(call: Call, self: torch.Tensor, target: torch.Tensor, reduction: int, delta: float) -> torch.Tensor:
    """The result has self's dtype."""
    if not torch.can_cast(torch.result_type(self, target), self.dtype):
        raise Refused("the difference cannot be cast to self's dtype")
    reduction = reduction if reduction in (MEAN, SUM) else NONE  # as in PyTorch
    result = elementwise_result([self, target], self.dtype)
    call.check_each_once()
    call.outputs(like=[result if reduction == NONE else result.new_empty(())])
    return loss(call, _huber, self, target, reduction=reduction, numbers=(delta,))


@operator("huber_loss_backward", one_dtype=["grad_output", "self", "target"])
def huber_loss_backward(
    call: Call, grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int, delta: float
) -> torch.Tensor:
    slope, numbers = _huber_slope, (delta,)
    return loss_backward(call, slope, grad_output, self, target, reduction=reduction, numbers=numbers, contiguous=True)


# Losses of labels: target is a probability, or -1 or 1


def _weighted(formula: Callable[[Expression, Expression], Expression]) -> Callable[..., Expression]:
    def weighted(a: Expression, b: Expression, weight: Expression | None = None) -> Expression:
        value = formula(a, b)
        return value if weight is None else value * weight

    return weighted


def _binary_cross_entropy(a: Expression, target: Expression) -> Expression:
    """Logarithms are clamped to -100, so that the loss of a confident wrong answer stays finite."""
    return (target - 1.0) * f.maximum(f.log1p(-a), -100.0) - target * f.maximum(f.log(a), -100.0)


def _binary_cross_entropy_slope(a: Expression, target: Expression) -> Expression:
    return (a - target) / f.maximum((1.0 - a) * a, 1e-12)


def _with_logits(a: Expression, target: Expression, weight: Expression | None) -> Expression:
    """`weight` is the weight of positive answers (pos_weight)."""
    log_sigmoid = f.minimum(a, 0.0) - f.log1p(f.exp(-f.absolute(a)))
    return (1.0 - target) * a - (log_sigmoid if weight is None else ((weight - 1.0) * target + 1.0) * log_sigmoid)


@operator("binary_cross_entropy", one_dtype=["self", "target", "weight"])
def binary_cross_entropy(
    call: Call, self: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int
) -> torch.Tensor:
    if reduction == NONE and self.shape == target.shape and call.overload is call.functional:
        call.outputs(like=[torch.empty_like(self, device="meta")])
    call.check_each_once()
    result = loss(call, _weighted(_binary_cross_entropy), self, target, weight, reduction=reduction)
    expect_values(
        (self, UNIT_INTERVAL, "all elements of input should be between 0 and 1"),
        (target, UNIT_INTERVAL, "all elements of target should be between 0 and 1"),
    )
    return result


@operator("binary_cross_entropy_backward", one_dtype=["grad_output", "self", "target", "weight"])
def binary_cross_entropy_backward(
    call: Call,
    grad_output: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
) -> torch.Tensor:
    slope = _weighted(_binary_cross_entropy_slope)
    return loss_backward(call, slope, grad_output, self, target, weight, reduction=reduction)


@operator("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    call: Call,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    pos_weight: torch.Tensor | None,
    reduction: int,
) -> torch.Tensor:
    def formula(a: Expression, target: Expression, *weights: Expression) -> Expression:
        given = iter(weights)
        each = next(given) if weight is not None else None
        value = _with_logits(a, target, next(given) if pos_weight is not None else None)
        return value if each is None else value * each

    if not self.is_floating_point():
        raise Refused("self is not floating-point")
    check_shape(target.shape, [self])
    (made,) = call.meta(call.functional)
    if made.dtype != target.dtype:  # torch 2.11's meta function promotes the dtypes
        call.outputs(like=[made.to(target.dtype)])
    return loss(call, formula, self, target, weight, pos_weight, reduction=reduction)


@operator("soft_margin_loss")
def soft_margin_loss(call: Call, self: torch.Tensor, target: torch.Tensor, reduction: int) -> torch.Tensor:
    """The result has self's dtype."""
    if self.dtype == torch.bool or not torch.can_cast(torch.result_type(self, target), self.dtype):
        raise Refused("self is bool, or the product cannot be cast to self's dtype")
    check_shape(self.shape, [target])
    check_same_dtype(call, self.dtype)
    scalar = torch.empty((), dtype=self.dtype, device="meta")
    call.check_each_once()
    call.outputs(like=[elementwise_result([self], self.dtype) if reduction == NONE else scalar])
    return loss(call, lambda a, b: f.log1p(f.exp(-a * b)), self, target, reduction=reduction)


@operator("soft_margin_loss_backward")
def soft_margin_loss_backward(
    call: Call, grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    check_shape(runtime.broadcast_shapes(self.shape, target.shape), [grad_output])
    _of_selfs_dtype(call, grad_output, self, target)

    def slope(a: Expression, b: Expression) -> Expression:
        power = f.exp(-b * a)
        return -b * power / (power + 1.0)

    return loss_backward(call, slope, grad_output, self, target, reduction=reduction)
