"""Indexing: index_select, index_add and similar operators, take, put_, and advanced indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.indexing import Index
from torch_backplane.operators.index_kernel import (
    COMBINE,
    check_index,
    check_slices,
    copied,
    identity_of,
    run_read,
    run_write,
    slices,
    with_dims,
)
from torch_backplane.operators.masks import (
    MASKS,
    check_masks,
    expands,
    fill,
    has_masks,
    only_mask,
    positions_of_masks,
    select,
    warn_of_expanded,
)
from torch_backplane.planning import (
    Call,
    Number,
    Refused,
    RunOnCPU,
    check,
    check_apart,
    check_number,
    check_same_dtype,
    each_once,
    operator,
    runtime,
    same_storage,
)
from torch_backplane.planning.call import as_meta


@operator("index_select", dtypes="complex")
def index_select(call: Call, self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    check_index(self, index)
    check_slices(self, dim, index)
    check_same_dtype(call, self.dtype)
    call.check_apart()
    (out,) = call.outputs()
    self = with_dims(self)
    _, kept, indices = slices(self, dim, index)
    run_read("index_select", with_dims(out), self, kept, indices)
    return out


@operator("put_", variants=False, dtypes="complex")
def put_(call: Call, self: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool) -> torch.Tensor:
    check_index(self, index)
    if index.dtype != torch.int64 or source.dtype != self.dtype or source.numel() != index.numel():
        raise Refused("index is not int64, or source has another dtype or number of elements")
    if source.device != self.device or (self.numel() == 0 and index.numel()):
        raise Refused("source is on another device, or self is empty")
    check_apart(self, [index, source])
    if index.numel() == 0:
        return self
    values = (source.clone() if same_storage(self, source) else source).reshape(-1)
    places = index.reshape(-1)
    flat = self.reshape(-1)  # a view if the elements are evenly spaced
    indices = [Index(places, places.stride(), flat.stride(0), flat.numel())]
    combine = "add" if accumulate else "assign"
    run_write("put_", flat, values, values.shape, [0], values.stride(), indices, combine=combine, wraps=True)
    return self if same_storage(self, flat) else self.copy_(flat.view(self.shape))


@operator("take", dtypes="complex")
def take(call: Call, self: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    check_index(self, index)
    check_same_dtype(call, self.dtype)
    call.check_apart()
    (out,) = call.outputs()
    flat = self.reshape(-1)  # a view if the elements are evenly spaced
    kept, indices = [0] * index.dim(), [Index(index, index.stride(), flat.stride(0), flat.numel())]
    return run_read("take", out, flat, kept, indices, wraps=True)


# index_add and similar operators, with an index for each slice


def _write_slices(
    name: str, call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: Any, **options: Any
) -> torch.Tensor:
    check_index(self, index)
    check_slices(self, dim, index, source)
    if call.is_in_place:
        check_apart(each_once(self) if name == "index_fill" else self, [index, source])
    out = copied(call, self)
    to, source = with_dims(out), with_dims(source)
    shape, kept, indices = slices(to, dim, index)
    strides = source.stride() if isinstance(source, torch.Tensor) else ()
    run_write(name, to, source, shape, kept, strides, indices, **options)
    return out


@operator("index_add", dtypes="complex")
def index_add(
    call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, alpha: Number
) -> torch.Tensor:
    check_index(self, index)
    check_same_dtype(call, self.dtype)
    check_slices(self, dim, index, source)
    check(source.dtype == self.dtype, "source has another dtype")  # the meta kernel does not check it without slices
    # Without alpha: the meta kernel rejects fractions, which PyTorch's kernels convert to integers.
    call.outputs(like=[torch.ops.aten.index_add.default(as_meta(self), dim, as_meta(index), as_meta(source))])
    if self.dim() == 1 and index.numel() == 0 and isinstance(alpha, Number):
        runtime.check_number(alpha.fitting(self.dtype))  # without indices, PyTorch only checks it for vectors
    return _write_slices("index_add", call, self, dim, index, source, combine="add", alpha=alpha)


@operator("index_copy", dtypes="complex")
def index_copy(call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return _write_slices("index_copy", call, self, dim, index, source)


@operator("index_reduce")
def index_reduce(
    call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, include_self: bool
) -> torch.Tensor:
    check_index(self, index)
    if reduce not in ("prod", "mean", "amax", "amin") or self.dtype == torch.bool or source.dtype != self.dtype:
        raise Refused("reduce is unknown, self is bool, or source has another dtype")
    check_slices(self, dim, index, source)
    if include_self and reduce != "mean":
        return _write_slices("index_reduce", call, self, dim, index, source, combine=COMBINE[reduce])
    wide = value_dtype(self.dtype)
    if reduce == "mean" and wide != self.dtype:
        (out,) = call.outputs()  # half precision may not hold the sum and the number of elements
        found = self.to(wide).index_reduce(dim, index, source.to(wide), reduce, include_self=include_self)
        return out.copy_(found)
    out = copied(call, self)
    if not include_self:
        out.index_fill_(dim, index.long(), identity_of(reduce, self.dtype))
    if reduce != "mean":
        return out.index_reduce_(dim, index, source, reduce)
    out.index_add_(dim, index, source)
    counts = torch.ones_like(out) if include_self else torch.zeros_like(out)
    counts.index_add_(dim, index, torch.ones_like(source)).clamp_(min=1)
    return out.div_(counts, rounding_mode=None if out.is_floating_point() else "floor")


@operator("index_fill.int_Scalar", "index_fill.int_Tensor", dtypes="complex")
def index_fill(call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    of_tensor = isinstance(value, Number) and value.tensor is not None  # the meta kernel rejects CPU tensors
    if index.dtype != torch.int64:
        raise Refused(f"an index of {index.dtype}".replace("torch.", ""))
    if isinstance(value, Number) and not of_tensor:
        check_number(value, self.dtype)
        if not self.numel() or not index.numel():
            runtime.check_number(value.fitting(self.dtype))
    expanded = call.is_in_place and each_once(self) is not self
    if not of_tensor:
        # Only for its errors: PyTorch's result has the strides of a clone, but the meta kernel's does not.
        call.meta(call.functional if expanded else None)
    if expanded or not call.is_in_place:
        call.outputs(like=[torch.empty_like(as_meta(self))], expanded=call.is_in_place)
    if call.is_in_place and isinstance(value, torch.Tensor) and same_storage(self, value):
        value = value.clone()  # PyTorch reads the value before it writes
    filled = _write_slices("index_fill", call, self, dim, index, value, wraps=True)
    if expanded:
        warn_of_expanded("index_fill_")
    return filled


# Advanced indexing


def _check_indices(self: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> None:
    given = [index for index in indices if index is not None]
    check_index(self, *(index for index in given if index.dtype not in MASKS))
    if not given:
        raise RunOnCPU("there are no indices")
    check_masks(self, indices)


def _advanced(self: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> tuple[list[int], list[int], list[Index]]:
    """(shape, kept, indices) of self[indices]. Dimensions of indices keep their place if they are adjacent, else they
    come first.

    Raises PyTorch's errors directly: masks may have been counted by now, and a planner that has launched kernels cannot
    leave the call to the CPU.
    """
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    if len(indices) > self.dim():
        raise IndexError(f"too many indices for tensor of dimension {self.dim()} (got {len(indices)})")
    shapes = [index.shape for index in given.values()]
    try:
        common = runtime.broadcast_shapes(*shapes)
    except RuntimeError:
        listed = ", ".join(str(list(shape)) for shape in shapes)
        raise IndexError(
            f"shape mismatch: indexing tensors could not be broadcast together with shapes {listed}"
        ) from None
    dims = list(given)
    if 0 not in common and any(not self.shape[dim] for dim in dims):
        raise IndexError("index is out of bounds for dimension with size 0")
    adjacent = dims[-1] - dims[0] + 1 == len(dims)
    before = [dim for dim in range(self.dim()) if dim not in given and adjacent and dim < dims[0]]
    after = [dim for dim in range(self.dim()) if dim not in given and dim not in before]
    shape = [*(self.shape[dim] for dim in before), *common, *(self.shape[dim] for dim in after)]
    kept = [*(self.stride(dim) for dim in before), *(0 for _ in common), *(self.stride(dim) for dim in after)]
    found = []
    for dim, index in given.items():
        strides = (*(0 for _ in before), *index.expand(common).stride(), *(0 for _ in after))
        found.append(Index(index, strides, self.stride(dim), self.size(dim)))
    return shape, kept, found


@operator("index.Tensor", "_unsafe_index.Tensor", dtypes="complex")
def index(call: Call, self: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    _check_indices(self, indices)
    if has_masks(indices):
        first = indices[0]
        if first is not None and first.dtype in MASKS and first.shape == self.shape:
            return select(call, self, first)
        self, indices = positions_of_masks(self, indices)
        _, kept, found = _advanced(self, indices)
        (out,) = call.outputs(like=_C.structured_meta("aten::index.Tensor", as_meta(self), as_meta(indices)))
    else:
        _, kept, found = _advanced(self, indices)
        (out,) = call.outputs()
    call.check_apart()
    return run_read("index", out, self, kept, found, wraps=True)


@operator("_index_put_impl_", variants=False, dtypes="complex")
def _index_put_impl_(
    call: Call, self: torch.Tensor, indices: list[torch.Tensor | None], values: Any, accumulate: bool, unsafe: bool
) -> torch.Tensor:
    """As in PyTorch, `values` can be a zero-dimensional CPU tensor."""
    is_tensor = isinstance(values, torch.Tensor)
    if values.dtype != self.dtype or (is_tensor and values.device != self.device):
        # `Refused` calls run on zeros. With a mask of zeros, the error would be about the number of values.
        leave = RunOnCPU if has_masks(indices) else Refused
        raise leave("values have another dtype or are on another device")
    _check_indices(self, indices)
    mask = only_mask(self, indices) if has_masks(indices) else None
    if mask is not None and not accumulate and (not is_tensor or values.numel() == 1):
        return fill(self, mask, values)
    once = each_once(self)
    if once is not self:
        warn_of_expanded("index_put_")
    check_apart(once, [indices, values])
    given, distinct = self, mask is not None
    if has_masks(indices):
        given, indices = positions_of_masks(self, indices)
    shape, kept, found = _advanced(given, indices)
    strides: Sequence[int] = ()
    if is_tensor:
        if not expands(values.shape, shape):
            raise RuntimeError(
                f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of "
                f"shape {shape}"
            )
        strides = values.expand(shape).stride()
    combine = "add" if accumulate else "assign"
    run_write("index_put_", given, values, shape, kept, strides, found, combine=combine, wraps=True, distinct=distinct)
    return self
