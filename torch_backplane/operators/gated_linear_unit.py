"""GLU (the first half of a dimension, gated by the second half) and its derivatives."""

from __future__ import annotations

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.planning import Call, Refused, check, check_same_dtype, operator, run_pointwise


def halves(tensor: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = tensor.chunk(2, dim)
    return first, second


def _glu_backward(grad: Expression, a: Expression, gate: Expression) -> tuple[Expression, Expression]:
    open_ = f.sigmoid(gate)
    return grad * open_, (1.0 - open_) * open_ * grad * a


@operator("glu")
def glu(call: Call, self: torch.Tensor, dim: int) -> torch.Tensor:
    (out,) = call.outputs()
    run_pointwise(lambda a, gate: a * f.sigmoid(gate), [out], halves(self, dim), key="glu", name="glu")
    return out


@operator("glu_backward", one_dtype=["grad_output", "self"])
def glu_backward(call: Call, grad_output: torch.Tensor, self: torch.Tensor, dim: int) -> torch.Tensor:
    check_same_dtype(call, self.dtype)
    (out,) = call.outputs()
    inputs = [grad_output, *halves(self, dim)]
    check(grad_output.shape == inputs[1].shape, "grad_output has another shape than the result")
    run_pointwise(_glu_backward, halves(out, dim), inputs, key="glu_backward", name="glu_backward")
    return out


def _glu_jvp(result: Expression, gate: Expression, a_step: Expression, gate_step: Expression) -> Expression:
    open_ = f.sigmoid(gate)
    return a_step * open_ + result * (1.0 - open_) * gate_step


@operator("glu_jvp")
def glu_jvp(call: Call, glu: torch.Tensor, x: torch.Tensor, dx: torch.Tensor, dim: int) -> torch.Tensor:
    (out,) = call.outputs(like=[torch.empty_like(glu, device="meta")])
    inputs = [glu, halves(x, dim)[1], *halves(dx, dim)]
    run_pointwise(_glu_jvp, [out], inputs, key="glu_jvp", name="glu_jvp")
    return out


def _glu_backward_jvp(
    grad: Expression, a: Expression, gate: Expression, grad_step: Expression, a_step: Expression, gate_step: Expression
) -> tuple[Expression, Expression]:
    """The directional derivatives of the gradients of both halves."""
    open_ = f.sigmoid(gate)
    slope = (1.0 - open_) * open_
    turn = slope * gate_step
    first = grad_step * open_ + grad * turn
    second = (grad_step * a + grad * a_step) * slope + grad * a * (1.0 - 2.0 * open_) * turn
    return first, second


@operator("glu_backward_jvp")
def glu_backward_jvp(
    call: Call,
    grad_x: torch.Tensor,
    grad_glu: torch.Tensor,
    x: torch.Tensor,
    dgrad_glu: torch.Tensor,
    dx: torch.Tensor,
    dim: int,
) -> torch.Tensor:
    if not x.is_floating_point():
        raise Refused("x is not floating-point")
    (out,) = call.outputs(like=[torch.empty(x.shape, dtype=x.dtype, device="meta")])
    inputs = [grad_glu, *halves(x, dim), dgrad_glu, *halves(dx, dim)]
    run_pointwise(_glu_backward_jvp, halves(out, dim), inputs, key="glu_backward_jvp", name="glu_backward_jvp")
    return out
