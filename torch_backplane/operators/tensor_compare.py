"""Selection and comparison: where, clamp, isin, classification of numbers; max, min and aminmax over dimensions."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_backplane.kernels import Expression, Reduction
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.expression import Operand
from torch_backplane.operators.reduce_ops import argument_of, extreme, greatest, least, leave_nothing
from torch_backplane.planning import (
    Call,
    Number,
    Refused,
    RunOnCPU,
    check_same_dtype,
    contiguous_result,
    operator,
    pointwise,
    run_kernel,
    run_pointwise,
)

# PyTorch still accepts a uint8 condition.
pointwise("where.self", lambda condition, a, b: f.where(condition.to(torch.bool), a, b), dtypes="complex")


def clamp(a: Expression, least: Operand | None, greatest: Operand | None) -> Expression:
    if least is not None:
        a = f.maximum(a, least)
    return a if greatest is None else f.minimum(a, greatest)


pointwise("clamp", clamp, fitting="stored")
pointwise("clamp.Tensor", clamp)
pointwise("clamp_min", f.maximum, fitting="stored")
pointwise("clamp_min.Tensor", f.maximum)
pointwise("clamp_max", f.minimum, fitting="stored")
pointwise("clamp_max.Tensor", f.minimum)


# Classification of numbers


def equals(a: Expression, number: float) -> Expression:
    """Whether `a` equals a float that no integer equals."""
    return a == number if f.is_float(a) else a != a


pointwise("isnan", lambda a: a != a, dtypes="complex")
pointwise("isinf", lambda a: f.isinf(a) if f.is_float(a) or a.is_complex else a != a, dtypes="complex")
pointwise("isposinf", lambda a: equals(a, math.inf))
pointwise("isneginf", lambda a: equals(a, -math.inf))


# isin

# assume_unique does not matter for a single number.
pointwise("isin.Tensor_Scalar", lambda a, b, assume_unique, invert: a != b if invert else a == b, fitting="any")


@operator("isin.Tensor_Tensor", "isin.Scalar_Tensor")
def isin(call: Call, elements: Any, test_elements: torch.Tensor, assume_unique: bool, invert: bool) -> torch.Tensor:
    """Sorts `test_elements`, and searches them for each element."""
    if torch.bool in (elements.dtype, test_elements.dtype) or elements.dtype.is_complex:
        raise Refused("isin of bools or a complex number")
    check_same_dtype(call, torch.bool)
    dtype = torch.result_type(elements.example if isinstance(elements, Number) else elements, test_elements)
    if isinstance(elements, Number):
        number, elements = elements, torch.empty((), dtype=dtype, device=test_elements.device)
        run_pointwise(lambda x: x, [elements], [], [(number, value_dtype(dtype))], key="value", name="value")
    like = torch.empty(elements.shape, dtype=torch.bool, device="meta")
    if isinstance(elements, torch.Tensor) and elements.device != test_elements.device:
        raise RunOnCPU("elements and test_elements are on different devices")
    (out,) = call.outputs(like=[like])
    if test_elements.numel() == 0:
        return out.fill_(invert)
    found = test_elements.to(dtype).reshape(-1).sort()[0]
    with contiguous_result(out) as result:
        run_kernel(
            "isin",
            """
  const value_t x = load_elements(item);
  index_t low = 0, high = size;
  while (low < high) {
    const index_t middle = low + (high - low) / 2;
    if (load_sorted(middle) < x) low = middle + 1;
    else high = middle;
  }
  store_out(item, (low < size && load_sorted(min(low, size - 1)) == x) != (invert != 0));
""",
            items=elements.numel(),
            outputs={"out": result},
            inputs={"elements": elements.to(dtype).contiguous(), "sorted": found},
            integers={"size": found.numel(), "invert": int(invert)},
            value=value_dtype(dtype),
        )
    return out


# Extrema with their positions, and aminmax


def both_extremes(dtype: torch.dtype) -> Reduction:
    def combine(a: Expression, most_a: Expression, b: Expression, most_b: Expression) -> tuple[Expression, Expression]:
        return f.minimum(a, b), f.maximum(most_a, most_b)

    worst = [greatest(dtype), least(dtype)]
    return Reduction([dtype] * 2, worst, lambda x, _: (x, x), combine, lambda a, most, _: (a, most))


@operator("aminmax")
def aminmax(call: Call, self: torch.Tensor, dim: int | None, keepdim: bool) -> Any:
    leave_nothing(self, dim)
    if any(out.dtype != self.dtype for out in call.outputs()):
        raise Refused("out has another dtype than self")
    return extreme(call, self, dim, both_extremes, key="aminmax")


@operator("_aminmax", "_aminmax.dim")
def _aminmax(call: Call, self: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """`aminmax`, under an older name."""
    leave_nothing(self, dim)
    least, most = call.outputs(like=torch.aminmax(torch.empty_like(self, device="meta"), dim=dim, keepdim=keepdim))
    return tuple(torch.aminmax(self, dim=dim, keepdim=keepdim, out=(least, most)))


@operator("max.dim")
def max_dim(call: Call, self: torch.Tensor, dim: int, keepdim: bool) -> Any:
    return extreme(call, self, dim, argument_of(True, True), key="max.dim")


@operator("min.dim")
def min_dim(call: Call, self: torch.Tensor, dim: int, keepdim: bool) -> Any:
    return extreme(call, self, dim, argument_of(False, True), key="min.dim")
