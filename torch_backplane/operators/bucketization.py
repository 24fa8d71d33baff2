"""Positions in sorted sequences: searchsorted and bucketize."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.planning import (
    Call,
    Number,
    Refused,
    RunOnCPU,
    check_same_dtype,
    contiguous_result,
    expect_values,
    operator,
    run_kernel,
    run_pointwise,
)

# The comparison is negated, as in PyTorch, because comparisons with NaN are false.
_SEARCH = """
  $value
  const index_t row = item / columns * size * many;
  index_t low = 0, high = size;
  while (low < high) {
    const index_t middle = low + (high - low) / 2;
    if (!(load_sorted(row + $middle) $reaches x)) low = middle + 1;
    else high = middle;
  }
  store_out(item, low);
"""


def search(out: torch.Tensor, boundaries: torch.Tensor, values: Any, right: bool, sorter: Any = None) -> torch.Tensor:
    """Writes to `out`, for each value, the number of boundaries less than it (`right`: less than or equal to it).

    Args:
        boundaries: A sorted vector for all values, or a sorted row for each row of values.
        values: A tensor of out's shape, or a number.
        sorter: The indices that sort each row, int64.
    """
    dtype = boundaries.dtype
    if isinstance(values, torch.Tensor) and values.dtype != dtype:
        raise RunOnCPU("values and boundaries have different dtypes")
    if isinstance(values, Number) and values.dtype.is_floating_point and not dtype.is_floating_point:
        raise Refused("a floating-point number with integer boundaries")
    if isinstance(values, Number) and dtype == torch.bool and values.dtype != dtype:
        raise RunOnCPU("a number with bool boundaries, which are compared in the number's dtype")
    if out.numel() == 0:
        return out
    is_tensor = isinstance(values, torch.Tensor)
    value = value_dtype(dtype)
    inputs = {"sorted": boundaries.contiguous()}
    if is_tensor:
        inputs["values"] = values.contiguous()
    if sorter is not None:
        inputs["sorter"] = _checked(sorter, boundaries.shape[-1])
    body = (
        _SEARCH.replace("$value", "const value_t x = load_values(item);" if is_tensor else "const value_t x = number;")
        .replace("$middle", "middle" if sorter is None else "load_sorter(row + middle)")
        .replace("$reaches", ">" if right else ">=")
    )
    with contiguous_result(out) as result:
        run_kernel(
            "searchsorted",
            body,
            items=out.numel(),
            outputs={"out": result},
            inputs=inputs,
            integers={
                "size": boundaries.shape[-1],
                "columns": out.shape[-1] if out.dim() else 1,
                "many": int(boundaries.dim() > 1),
            },
            numbers=None if is_tensor else {"number": (value, values)},
            value=value,
        )
    return out


def _checked(sorter: torch.Tensor, size: int) -> torch.Tensor:
    """The sorter, contiguous and with indices clamped to the row. Reports indices out of range as an error."""
    places = torch.empty(sorter.shape, dtype=sorter.dtype, device=sorter.device)
    within = torch.empty(sorter.shape, dtype=torch.float32, device=sorter.device)

    def formula(place: Expression, last: Expression) -> tuple[Expression, Expression]:
        bounded = f.maximum(f.minimum(place, last), 0)
        return bounded, (bounded == place).to(torch.float32)

    run_pointwise(formula, [places, within], [sorter], [(size - 1, torch.int64)], key="sorter", name="sorter")
    expect_values((within, "x > (value_t)0", "torch.searchsorted(): sorter index out of range"))
    return places


@operator("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    call: Call, sorted_sequence: torch.Tensor, self: Any, out_int32: bool, right: bool, side: str | None, sorter: Any
) -> torch.Tensor:
    if side not in (None, "left", "right") or (side == "left" and right):
        raise Refused("side is unknown or contradicts right")
    shape = sorted_sequence.shape
    # Rows of boundaries need the same number of rows of values.
    if not shape or (len(shape) > 1 and not (isinstance(self, torch.Tensor) and self.dim() == len(shape))):
        raise Refused("boundaries are zero-dimensional, or values have another number of dimensions")
    if len(shape) > 1 and self.shape[:-1] != shape[:-1]:
        raise Refused("rows of values do not match rows of boundaries")
    if sorter is not None and (sorter.shape != sorted_sequence.shape or sorter.dtype != torch.int64):
        raise Refused("sorter is not int64 of the boundaries' shape")
    check_same_dtype(call, torch.int32 if out_int32 else torch.int64)
    (out,) = call.outputs()
    return search(out, sorted_sequence, self, right or side == "right", sorter)


@operator("bucketize.Tensor", "bucketize.Scalar")
def bucketize(call: Call, self: Any, boundaries: torch.Tensor, out_int32: bool, right: bool) -> torch.Tensor:
    if boundaries.dim() != 1:
        raise Refused("boundaries are not one-dimensional")
    check_same_dtype(call, torch.int32 if out_int32 else torch.int64)
    (out,) = call.outputs()
    return search(out, boundaries, self, right)
