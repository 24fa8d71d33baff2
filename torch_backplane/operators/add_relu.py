"""A sum and its ReLU in one operator."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.planning import Call, Number, RunOnCPU, operator, plan_pointwise, run_pointwise


def add_relu(a: Expression, b: Expression, alpha: Expression) -> Expression:
    """As in PyTorch, the sum between zero and the greatest number, so never infinite."""
    total = a + alpha * b
    if not f.is_float(total):
        return f.maximum(total, 0)
    return f.clamp(total, 0.0, torch.finfo(total.dtype).max)


def _check_add_relu(*dtypes: torch.dtype) -> None:
    if any((dtype.itemsize == 2 and dtype.is_floating_point) or dtype == torch.bool for dtype in dtypes):
        raise RunOnCPU("a dtype that PyTorch refuses")


@operator("_add_relu.Tensor")
def add_relu_tensor(call: Call, self: torch.Tensor, other: torch.Tensor, alpha: Any) -> torch.Tensor:
    _check_add_relu(torch.result_type(self, other))
    call.outputs(like=call.meta(call.functional))  # there is no meta kernel of the form with `out=`
    return plan_pointwise("_add_relu", add_relu, call, (self, other, alpha))


@operator("_add_relu.Scalar")
def add_relu_number(call: Call, self: torch.Tensor, other: Number, alpha: Number) -> torch.Tensor:
    _check_add_relu(self.dtype)
    if not self.is_floating_point() and (other.dtype.is_floating_point or alpha.dtype.is_floating_point):
        raise RunOnCPU("a float among integers")
    (out,) = call.outputs(like=[torch.empty_like(self, device="meta")])
    dtype = value_dtype(self.dtype)
    scalars = [(other, dtype), (alpha.fitting(self.dtype), dtype)]  # PyTorch makes a tensor of `other`
    run_pointwise(add_relu, [out], [self], scalars, key="_add_relu", name="add_relu")
    return out
