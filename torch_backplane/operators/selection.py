"""Choosing between values: where, masked_fill, nan_to_num."""

from __future__ import annotations

import math

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.planning import Call, copy_elements, operator, pointwise, run_pointwise

# A condition that is not bool is uint8, which PyTorch still takes.
pointwise("where.self", lambda condition, a, b: f.where(condition.to(torch.bool), a, b))
pointwise("masked_fill.Scalar", lambda a, mask, value: f.where(mask.to(torch.bool), value, a))
pointwise("masked_fill.Tensor", lambda a, mask, value: f.where(mask.to(torch.bool), value, a))


def replace_nonfinite(a: Expression, nan: Expression, posinf: Expression, neginf: Expression) -> Expression:
    a = f.where(f.isnan(a), nan, a)
    return f.where(a == math.inf, posinf, f.where(a == -math.inf, neginf, a))


@operator("nan_to_num", passed_through=["nan", "posinf", "neginf"])
def nan_to_num(
    call: Call, self: torch.Tensor, nan: float | None, posinf: float | None, neginf: float | None
) -> torch.Tensor:
    """Infinities become the greatest and least numbers of the stored dtype, which a formula does not see."""
    (out,) = call.outputs()
    if not self.dtype.is_floating_point:
        copy_elements(out, self)
        return out
    dtype, limits = value_dtype(self.dtype), torch.finfo(self.dtype)
    numbers = [
        (0.0 if nan is None else nan, dtype),
        (limits.max if posinf is None else posinf, dtype),
        (limits.min if neginf is None else neginf, dtype),
    ]
    run_pointwise(replace_nonfinite, [out], [self], numbers, key="nan_to_num", name="nan_to_num")
    return out
