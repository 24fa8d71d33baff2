"""Comparisons, logic, and questions about single numbers: what gives bools."""

from __future__ import annotations

import math

import torch

from torch_backplane.kernels import Expression, Reduction
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.planning import Call, RunOnCPU, operator, pointwise, run_reduction

for overload in ("Tensor", "Scalar"):
    pointwise(f"eq.{overload}", lambda a, b: a == b)
    pointwise(f"ne.{overload}", lambda a, b: a != b)
    pointwise(f"lt.{overload}", lambda a, b: a < b)
    pointwise(f"le.{overload}", lambda a, b: a <= b)
    pointwise(f"gt.{overload}", lambda a, b: a > b)
    pointwise(f"ge.{overload}", lambda a, b: a >= b)

pointwise("logical_and", lambda a, b: a.to(torch.bool) & b.to(torch.bool))
pointwise("logical_or", lambda a, b: a.to(torch.bool) | b.to(torch.bool))
pointwise("logical_xor", lambda a, b: a.to(torch.bool) ^ b.to(torch.bool))
pointwise("logical_not", lambda a: ~a.to(torch.bool))


def signbit(a: Expression) -> Expression:
    if f.is_float(a):
        return f.signbit(a)
    return f.full_like(a, False) if a.dtype == torch.bool else a < 0


def equals(a: Expression, number: float) -> Expression:
    """Whether a is this float; no integer is."""
    return a == number if f.is_float(a) else a != a


pointwise("isnan", lambda a: a != a)
pointwise("isinf", lambda a: f.isinf(a) if f.is_float(a) else a != a)
pointwise("isposinf", lambda a: equals(a, math.inf))
pointwise("isneginf", lambda a: equals(a, -math.inf))
pointwise("signbit", signbit)
# assume_unique only matters where there are many to look for.
pointwise("isin.Tensor_Scalar", lambda a, b, assume_unique, invert: a != b if invert else a == b)


@operator("equal")
def equal(call: Call, self: torch.Tensor, other: torch.Tensor) -> bool:
    """Waits for the device, as the answer is Python's, so there is no plan where the contents decide."""
    if self.dtype != other.dtype:
        raise RunOnCPU("tensors of two dtypes")
    if self.shape != other.shape:
        return False
    if self.numel() == 0:
        return True
    if self.dim() == 0:
        self, other = self.view(1), other.view(1)
    same = Reduction([torch.bool], [True], lambda a, b, _: a == b, lambda a, b: a & b, lambda s, _: s)
    found = torch.empty((), dtype=torch.bool, device=self.device)
    dims, dtype = range(self.dim()), value_dtype(self.dtype)
    run_reduction(same, [found], [self, other], dims, key=("equal", dtype), compute=dtype, name="equal")
    return bool(found.item())
