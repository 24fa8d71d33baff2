"""Comparisons, logic, and questions about single numbers: what gives bools."""

from __future__ import annotations

import math

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.planning import pointwise

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
pointwise("logical_not", lambda a: ~a.to(torch.bool), dtypes="complex")


def signbit(a: Expression) -> Expression:
    if f.is_float(a):
        return f.signbit(a)
    return f.full_like(a, False) if a.dtype == torch.bool else a < 0


def equals(a: Expression, number: float) -> Expression:
    """Whether a is this float; no integer is."""
    return a == number if f.is_float(a) else a != a


pointwise("isnan", lambda a: a != a, dtypes="complex")
pointwise("isinf", lambda a: f.isinf(a) if f.is_float(a) or a.is_complex else a != a, dtypes="complex")
pointwise("isposinf", lambda a: equals(a, math.inf))
pointwise("isneginf", lambda a: equals(a, -math.inf))
pointwise("signbit", signbit)
# assume_unique only matters where there are many to look for.
pointwise("isin.Tensor_Scalar", lambda a, b, assume_unique, invert: a != b if invert else a == b, fitting="any")
