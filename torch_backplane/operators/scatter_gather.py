"""gather, scatter and similar operators, with an index for each element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.operators.index_kernel import (
    COMBINE,
    along,
    check_index,
    check_places,
    copied,
    identity_of,
    run_read,
    run_write,
    with_dims,
)
from torch_backplane.planning import Call, Refused, operator


@operator("gather", dtypes="complex")
def gather(call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, sparse_grad: bool) -> torch.Tensor:
    check_index(self, index)
    given, index = with_dims(self), with_dims(index)
    check_places(given, dim, index)
    (out,) = call.outputs()
    if out.numel():
        run_read("gather", with_dims(out), given, *along(given, dim, index))
    return out


def _check_reduction(reduce: str, known: Sequence[str]) -> None:
    if reduce not in known:
        raise Refused("reduce is unknown")


def _scatter(call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: Any, combine: str) -> torch.Tensor:
    check_index(self, index)
    index, source = with_dims(index), with_dims(source)
    check_places(with_dims(self), dim, index, source)
    out = copied(call, self)
    if index.numel():
        strides = source.stride() if isinstance(source, torch.Tensor) else ()
        to = with_dims(out)
        kept, indices = along(to, dim, index)
        run_write("scatter", to, source, index.shape, kept, strides, indices, combine=combine)
    return out


@operator("scatter.src", "scatter.value", dtypes="complex")
def scatter(call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: Any) -> torch.Tensor:
    return _scatter(call, self, dim, index, source, "assign")


@operator("scatter_add", dtypes="complex")
def scatter_add(call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return _scatter(call, self, dim, index, source, "add")


@operator("scatter.reduce", "scatter.value_reduce")
def scatter_reduce(
    call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: Any, reduce: str
) -> torch.Tensor:
    _check_reduction(reduce, ("add", "multiply"))
    return _scatter(call, self, dim, index, source, COMBINE[reduce])


@operator("scatter_reduce.two")
def scatter_reduce_two(
    call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, include_self: bool
) -> torch.Tensor:
    _check_reduction(reduce, ("sum", "prod", "mean", "amin", "amax"))
    if include_self and reduce != "mean":
        return _scatter(call, self, dim, index, source, COMBINE[reduce])
    check_index(self, index)
    check_places(*(with_dims(self), dim, with_dims(index), with_dims(source)))
    if self.dtype == torch.bool or source.dtype != self.dtype:
        raise Refused(f"{source.dtype} into {self.dtype}".replace("torch.", ""))
    wide = value_dtype(self.dtype)
    if reduce == "mean" and wide != self.dtype:
        (out,) = call.outputs()  # half precision may not hold the sum and the number of elements
        found = self.to(wide).scatter_reduce(dim, index, source.to(wide), reduce, include_self=include_self)
        return out.copy_(found)
    out = copied(call, self)
    if not include_self:
        out.scatter_(dim, index, identity_of(reduce, self.dtype))
    out.scatter_reduce_(dim, index, source, "sum" if reduce == "mean" else reduce)
    if reduce == "mean":
        counts = torch.ones_like(out) if include_self else torch.zeros_like(out)
        counts.scatter_add_(dim, index, torch.ones_like(source)).clamp_(min=1)
        out.div_(counts, rounding_mode=None if out.is_floating_point() else "floor")
    return out
