"""Places in sorted sequences: searchsorted, bucketize."""

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

# In the order of NaN: no comparison with it holds.
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
    """out: for each value, how many boundaries are less than it (or as great, if `right`).

    Args:
        boundaries: of one dimension, for all values, or a sorted row for each row of values.
        values: a tensor of out's shape, or a number.
        sorter: the order of each row, int64.
    """
    dtype = boundaries.dtype
    if isinstance(values, torch.Tensor) and values.dtype != dtype:
        raise RunOnCPU("values and boundaries of two dtypes")
    if isinstance(values, Number) and values.dtype.is_floating_point and not dtype.is_floating_point:
        raise Refused("a float among integers")
    if isinstance(values, Number) and dtype == torch.bool and values.dtype != dtype:
        raise RunOnCPU("a number among bools, which are compared as its dtype")
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
    """The order with every place within the row, contiguous; one that is not is reported."""
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
        raise Refused("a side that is none")
    shape = sorted_sequence.shape
    # Rows of boundaries take as many rows of values.
    if not shape or (len(shape) > 1 and not (isinstance(self, torch.Tensor) and self.dim() == len(shape))):
        raise Refused("boundaries without dimensions, or rows of them for a number")
    if len(shape) > 1 and self.shape[:-1] != shape[:-1]:
        raise Refused("rows of values and of boundaries that do not belong together")
    if sorter is not None and (sorter.shape != sorted_sequence.shape or sorter.dtype != torch.int64):
        raise Refused("an order of other boundaries, or of another dtype")
    check_same_dtype(call, torch.int32 if out_int32 else torch.int64)
    (out,) = call.outputs()
    return search(out, sorted_sequence, self, right or side == "right", sorter)


@operator("bucketize.Tensor", "bucketize.Scalar")
def bucketize(call: Call, self: Any, boundaries: torch.Tensor, out_int32: bool, right: bool) -> torch.Tensor:
    if boundaries.dim() != 1:
        raise Refused("boundaries that are no vector")
    check_same_dtype(call, torch.int32 if out_int32 else torch.int64)
    (out,) = call.outputs()
    return search(out, boundaries, self, right)
