"""Reads and writes by index: the basis of indexing, scatter, gather and embeddings."""

from __future__ import annotations

import math
import operator as compare
from collections.abc import Sequence
from typing import Any

import torch

from torch_backplane.kernels.dtypes import integer_range, value_dtype
from torch_backplane.kernels.templates.indexing import Index, Places, WriteParams, read, write
from torch_backplane.planning import (
    Call,
    Number,
    Refused,
    RunOnCPU,
    check_number,
    error_report,
    run_pointwise,
    run_template,
    runtime,
)


def check_index(self: torch.Tensor, *indices: torch.Tensor) -> None:
    """Leaves a call to the CPU if kernels do not support an index."""
    for index in indices:
        if index.dtype not in (torch.int64, torch.int32):
            raise Refused(f"an index of {index.dtype}".replace("torch.", ""))
        if index.device != self.device:
            raise RunOnCPU("an index on another device")


# The checks below refuse all calls whose sizes are invalid: the CPU kernel raises the error. That includes indices into
# an empty dimension, which kernels would only report at the next synchronization.


def check_dim(self: torch.Tensor, dim: int, *indices: torch.Tensor) -> None:
    rank = max(self.dim(), 1)
    if not -rank <= dim < rank:
        raise Refused("dim is out of range")
    if any(index.numel() for index in indices) and self.dim() and not self.shape[dim]:
        raise Refused("indices into an empty dimension")


def check_places(self: torch.Tensor, dim: int, index: torch.Tensor, source: Any = None) -> None:
    """Checks gather and scatter. Zero-dimensional tensors must have been given a dimension (`with_dims`)."""
    check_dim(self, dim, index)
    if not index.numel():
        return
    ranks = {one.dim() for one in (self, index, source) if isinstance(one, torch.Tensor)}
    if len(ranks) > 1 or any(
        size > most for d, (size, most) in enumerate(zip(index.shape, self.shape, strict=True)) if d != dim % self.dim()
    ):
        raise Refused("index is larger than self, or has another number of dimensions")
    if isinstance(source, torch.Tensor) and any(map(compare.gt, index.shape, source.shape)):
        raise Refused("index is larger than its source")


def check_slices(self: torch.Tensor, dim: int, index: torch.Tensor, source: Any = None) -> None:
    """Checks index_select, index_add and similar operators."""
    check_dim(self, dim, index)
    if index.dim() > 1 or (self.dim() == 0 and index.numel() != 1):
        raise Refused("index is not a vector, or not one element for a zero-dimensional tensor")
    if isinstance(source, torch.Tensor):
        shape = list(self.shape)
        if shape:
            shape[dim] = index.numel()
        if list(source.shape) != shape:
            raise Refused("slices have another shape")


def with_dims(tensor: Any) -> Any:
    """Adds a dimension to a zero-dimensional tensor. Numbers and other tensors are returned unchanged."""
    return tensor.view(1) if isinstance(tensor, torch.Tensor) and not tensor.dim() else tensor


def run_read(
    name: str, out: torch.Tensor, self: torch.Tensor, kept: Sequence[int], indices: Sequence[Index], wraps: bool = False
) -> torch.Tensor:
    if out.numel():
        report = error_report(out.device, name)
        run_template(read, out.device, out, self, kept, indices, report, wraps=wraps, name=name)
    return out


def run_write(
    name: str, self: torch.Tensor, source: Any, shape: Sequence[int], *arguments: Any, **options: Any
) -> None:
    if 0 in shape:
        return
    check_number(source, self.dtype)
    if isinstance(source, torch.Tensor) and source.dtype != self.dtype:
        raise Refused(f"{source.dtype} into {self.dtype}".replace("torch.", ""))
    source = source.fitting(self.dtype) if isinstance(source, Number) else source
    kept, strides, indices = arguments
    if isinstance(options.get("alpha"), Number):
        if self.dtype == torch.bool and options["alpha"].dtype.is_complex:
            raise RunOnCPU("a complex alpha for bools")
        options["alpha"] = options["alpha"].fitting(self.dtype)
    if self.is_complex():
        _write_parts(name, self, source, Places(shape, kept, strides, indices), **options)
        return
    deterministic = options.pop("in_order", False) or torch.are_deterministic_algorithms_enabled()
    meet = options.get("combine") in ("add", "multiply") and not options.get("distinct")
    several = any(size > 1 and step == 0 for size, step in zip(shape, kept, strict=True))
    # Half precision accumulates in float32: rounded after each addition, a large sum would stop growing.
    wide = value_dtype(self.dtype) if meet and several else self.dtype
    to = self
    if wide != self.dtype:
        to = runtime.empty_strided(self.shape, self.stride(), wide, self.device).copy_(self)
    params = WriteParams(deterministic=deterministic, **options)
    places = Places(shape, kept, strides, indices)
    run_template(write, self.device, to, source, places, error_report(self.device, name), params, name=name)
    if to is not self:
        self.copy_(to)


def _write_parts(
    name: str,
    self: torch.Tensor,
    source: Any,
    places: Places,
    combine: str = "assign",
    alpha: Any = None,
    **options: Any,
) -> None:
    """`run_write` of complex numbers, as pairs of real numbers in a last dimension."""
    shape, kept, strides, indices = places
    if combine not in ("assign", "add"):
        raise RunOnCPU(f"{combine} of complex numbers")
    if not isinstance(source, torch.Tensor):
        number, source, strides = source, torch.empty((), dtype=self.dtype, device=self.device), [0] * len(shape)
        run_pointwise(lambda value: value, [source], [], [(number, self.dtype)], key="value", name="value")
    if alpha is not None:
        scaled = torch.empty_like(source)
        run_pointwise(lambda x, by: x * by, [scaled], [source], [(alpha, self.dtype)], key="scaled", name="scaled")
        source, strides = scaled, scaled.expand(shape).stride()
    run_write(
        name,
        torch.view_as_real(self),
        torch.view_as_real(source),
        [*shape, 2],
        [*(2 * step for step in kept), 1],
        [*(2 * step for step in strides), 1],
        [Index(one.tensor, (*one.strides, 0), 2 * one.step, one.size) for one in indices],
        combine=combine,
        in_order=combine == "assign",  # if indices repeat, both parts must come from the same value
        **options,
    )


def copied(call: Call, self: torch.Tensor) -> torch.Tensor:
    """The result of an operator that changes some elements of self, initialized with self's elements."""
    (out,) = call.outputs()
    if out is not self:
        out.copy_(self)
    return out


def slices(self: torch.Tensor, dim: int, index: torch.Tensor) -> tuple[list[int], list[int], list[Index]]:
    """(shape, kept, indices) if each index selects a whole slice of self along dim. Self is not zero-dimensional."""
    shape, kept = list(self.shape), list(self.stride())
    dim %= self.dim()
    shape[dim], kept[dim] = index.numel(), 0
    strides = tuple(_step(index) if d == dim else 0 for d in range(self.dim()))
    return shape, kept, [Index(index, strides, self.stride(dim), self.size(dim))]


def _step(index: torch.Tensor) -> int:
    """The stride of a one- or zero-dimensional index."""
    return index.stride(0) if index.dim() else 0


def along(self: torch.Tensor, dim: int, index: torch.Tensor) -> tuple[list[int], list[Index]]:
    """(kept, indices) if an element of index replaces the coordinate in dim. Index has self's rank, at least 1."""
    dim %= self.dim()
    kept = [0 if d == dim else step for d, step in enumerate(self.stride())]
    return kept, [Index(index, index.stride(), self.stride(dim), self.size(dim))]


# How the reductions of scatter_reduce and index_reduce combine a value with the element in memory.
COMBINE = {"add": "add", "sum": "add", "multiply": "multiply", "prod": "multiply", "amin": "amin", "amax": "amax"}


def identity_of(reduce: str, dtype: torch.dtype) -> int | float:
    """The initial value of a reduction that ignores the previous elements of self."""
    if reduce in ("amin", "amax"):
        if dtype.is_floating_point:
            return math.inf if reduce == "amin" else -math.inf
        least, greatest = integer_range(dtype)
        return greatest if reduce == "amin" else least
    return 1 if reduce == "prod" else 0
