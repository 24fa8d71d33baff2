"""Choosing between values: where, masked_fill, nan_to_num."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import part_dtype, value_dtype
from torch_backplane.operators.masks import check_same_dtype, of_expanded
from torch_backplane.planning import (
    Call,
    check_number,
    copy_elements,
    each_once,
    operator,
    plan_pointwise,
    pointwise,
    run_pointwise,
    socket,
)
from torch_backplane.planning.call import as_meta, shares_memory


def choose_value(a: Expression, mask: Expression, value: Expression) -> Expression:
    return f.where(mask.to(torch.bool), value, a)


# A condition that is not bool is uint8, which PyTorch still takes.
pointwise("where.self", lambda condition, a, b: f.where(condition.to(torch.bool), a, b), dtypes="complex")


@operator("masked_fill.Scalar", "masked_fill.Tensor", dtypes="complex")
def masked_fill(call: Call, self: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    """A value in a CPU tensor, a number, is refused by its overload's meta kernel: the one for numbers is asked."""
    check_masked_fill(call, self, mask, value)
    check_number(value, self.dtype)
    if isinstance(value, torch.Tensor):
        if call.is_in_place and shares_memory(self, [value]):
            value = value.clone()
        if call.is_in_place and self.numel() and each_once(self) is not self:
            once, mask = of_expanded(self, mask)
            once.masked_fill_(mask, value)
            return self
        return plan_pointwise("masked_fill.Tensor", choose_value, call, (self, mask, value))
    result = torch.ops.aten.masked_fill.Scalar(as_meta(self), as_meta(mask), 0)  # of any number, which `fitting` checks
    (out,) = call.outputs(like=(result,), expanded=call.is_in_place)
    if call.is_in_place and self.numel():
        self, mask = of_expanded(self, mask)
        out = self
    dtype = value_dtype(self.dtype)
    run_pointwise(
        choose_value,
        [out],
        [self, mask],
        [(value.fitting(self.dtype), dtype)],
        compute=[dtype, torch.bool],
        key="masked_fill",
        name="masked_fill",
    )
    return call.outputs()[0]


def check_masked_fill(call: Call, self: torch.Tensor, mask: torch.Tensor, value: Any) -> None:
    """Raises PyTorch's errors, in the order and the words of its CPU kernels."""
    if not call.is_in_place:
        socket.check_broadcast([mask, self])
    dims = value.dim() if isinstance(value, torch.Tensor) else 0
    if dims > 0 or mask.dtype != torch.bool:
        nothing = torch.empty(0)
        nothing.masked_fill_(torch.empty(0, dtype=mask.dtype), torch.empty([1] * dims))
    socket.check_broadcast([self, mask])


def replace_nonfinite(a: Expression, nan: Expression, posinf: Expression, neginf: Expression) -> Expression:
    if a.is_complex:
        return f.complex(*(replace_nonfinite(part, nan, posinf, neginf) for part in (a.real, a.imag)))
    a = f.where(f.isnan(a), nan, a)
    return f.where(a == math.inf, posinf, f.where(a == -math.inf, neginf, a))


@operator("nan_to_num", passed_through=["nan", "posinf", "neginf"], dtypes="complex")
def nan_to_num(
    call: Call, self: torch.Tensor, nan: float | None, posinf: float | None, neginf: float | None
) -> torch.Tensor:
    """Infinities become the greatest and least numbers of the stored dtype, which a formula does not see."""
    check_same_dtype(call, self.dtype)
    of_integers = not (self.is_floating_point() or self.is_complex())
    if of_integers and call.is_in_place:
        return call.written[0]  # of any strides: PyTorch copies it to itself, which is nothing
    socket.check_overlaps(call.written, [])  # before they are resized
    (out,) = call.outputs(elementwise=True)
    if of_integers:
        copy_elements(out, self)
        return out
    dtype, limits = part_dtype(value_dtype(self.dtype)), torch.finfo(self.dtype)
    numbers = [
        (0.0 if nan is None else nan, dtype),
        (limits.max if posinf is None else posinf, dtype),
        (limits.min if neginf is None else neginf, dtype),
    ]
    run_pointwise(replace_nonfinite, [out], [self], numbers, key="nan_to_num", name="nan_to_num")
    return out
