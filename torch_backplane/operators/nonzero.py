"""Elements that are not zero: nonzero, nonzero_static and count_nonzero.

The size of most results is in device memory. Their planners wait for it, and run at every call. The steps before and
after the wait are operators with plans (`part`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_backplane.kernels import Reduction
from torch_backplane.kernels.templates import compact
from torch_backplane.kernels.templates.source import named, split
from torch_backplane.operators.reduce_ops import Dims, reduce
from torch_backplane.planning import (
    Call,
    Refused,
    check_same_dtype,
    dialect_of,
    operator,
    part,
    run_kernel,
    run_template,
)


class Selection:
    """The elements of a tensor that are not zero. Their number is counted in device memory."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask.contiguous()
        self.starts: torch.Tensor = count_set(self.mask)

    @property
    def count(self) -> torch.Tensor:
        """The number of elements, on the device."""
        return self.starts[-1]

    def positions(self, size: int) -> torch.Tensor:
        """The positions of the first `size` elements in the flattened tensor, int64."""
        out = torch.empty(size, dtype=torch.int64, device=self.mask.device)
        if size:
            write_positions(out, self.mask, self.starts)
        return out

    def coordinates(self, out: torch.Tensor, fill: int | None = None) -> torch.Tensor:
        """out[i] = the coordinates of the i-th element, or `fill` beyond the last one.

        Args:
            out: (size, dimensions), int64. Without `fill`, size must not exceed the number of elements.
        """
        if out.numel() and fill is None and self.mask.dim() == 1 and out.is_contiguous():
            write_positions(out, self.mask, self.starts)
        elif out.numel():
            write_coordinates(out, self.mask, self.starts, fill or 0)
        return out


@part("(Tensor mask) -> Tensor", dtypes="any")
def count_set(call: Call, mask: torch.Tensor) -> torch.Tensor:
    """The start of the results of each block of the contiguous mask, and their total number as the last element."""
    starts = torch.empty(compact.block_count(dialect_of(mask.device), mask) + 1, dtype=torch.int64, device=mask.device)
    run_template(compact.count, mask.device, starts, mask, name="nonzero")
    run_template(compact.sum_up, mask.device, starts, name="nonzero")
    return starts


@part("(Tensor(a!) out, Tensor mask, Tensor starts) -> ()", dtypes="any")
def write_positions(call: Call, out: torch.Tensor, mask: torch.Tensor, starts: torch.Tensor) -> None:
    run_template(compact.positions, out.device, out.view(-1), mask, starts, name="nonzero")


@part("(Tensor(a!) out, Tensor mask, Tensor starts, int fill) -> ()", dtypes="any", passed_through=["fill"])
def write_coordinates(call: Call, out: torch.Tensor, mask: torch.Tensor, starts: torch.Tensor, fill: int) -> None:
    positions = torch.empty(out.shape[0], dtype=torch.int64, device=out.device)
    run_template(compact.positions, out.device, positions, mask, starts, name="nonzero")
    names = [f"c{d}" for d in range(mask.dim())]
    stores = " ".join(
        f"store_out(item * out_step + {d} * out_column, there ? {name} : fill);" for d, name in enumerate(names)
    )
    run_kernel(
        "nonzero",
        f"""
  const bool there = item < load_total(0);
  const index_t at = there ? load_positions(item) : 0;
  {split("at", [f"size{d}" for d in range(mask.dim())], names)}
  {stores}
""",
        items=out.shape[0],
        outputs={"out": out},
        inputs={"positions": positions, "total": starts[-1:]},
        # The number of elements determines the width of positions (index_t).
        integers={
            "elements": mask.numel(),
            "out_step": out.stride(0),
            "out_column": out.stride(1),
            **named("size", mask.shape),
        },
        numbers={"fill": (torch.int64, fill)},
        value=torch.int64,
        strided={"out"},
    )


def sizes(selections: Sequence[Selection]) -> list[int]:
    """The number of elements of each selection, on the host. Waits for the device, once in a call."""
    if len(selections) == 1:
        return [int(selections[0].count.item())]
    return torch.stack([one.count for one in selections]).tolist()


@operator("nonzero", dtypes="complex")
def nonzero(call: Call, self: torch.Tensor) -> torch.Tensor:
    check_same_dtype(call, torch.int64)
    call.check_apart()
    size, selection = 0, None
    if self.numel():
        selection = Selection(self)
        (size,) = sizes([selection])
    # The columns of the result are contiguous, as in PyTorch.
    like = torch.empty(self.dim(), size, dtype=torch.int64, device="meta").t()
    (out,) = call.outputs(like=[like])
    return out if selection is None else selection.coordinates(out)


@operator("nonzero_static", dtypes="complex")
def nonzero_static(call: Call, self: torch.Tensor, size: int, fill_value: int) -> torch.Tensor:
    check_same_dtype(call, torch.int64)
    if size < 0:
        raise Refused("size is negative")
    # PyTorch's meta kernel has other strides than its CPU kernel.
    (out,) = call.outputs(like=[torch.empty(size, self.dim(), dtype=torch.int64, device="meta")])
    call.check_apart()
    if not self.numel():
        return out.fill_(fill_value)
    return Selection(self).coordinates(out, fill_value) if out.numel() else out


def number_of_nonzero(dtype: torch.dtype) -> Reduction:
    return Reduction([torch.int64], [0], lambda x, _: x.to(torch.int64), lambda a, b: a + b, lambda s, _: s)


@operator("count_nonzero.dim_IntList", dtypes="complex")
def count_nonzero(call: Call, self: torch.Tensor, dim: Dims) -> Any:
    return reduce(call, self, dim, number_of_nonzero, key="count_nonzero", compute=torch.bool)
