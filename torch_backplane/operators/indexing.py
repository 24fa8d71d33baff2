"""Reading and writing by index: index_select, gather, scatter, advanced indexing, embeddings."""

from __future__ import annotations

import math
import operator as compare
from collections.abc import Sequence
from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.kernels.dtypes import integer_range
from torch_backplane.kernels.templates.indexing import Index, read, write
from torch_backplane.operators.masks import (
    MASKS,
    check_masks,
    check_same_dtype,
    expands,
    fill,
    has_masks,
    only_mask,
    positions_of_masks,
    same_storage,
    select,
    warn_of_expanded,
)
from torch_backplane.planning import (
    Call,
    Number,
    RunOnCPU,
    check_number,
    each_once,
    error_words,
    operator,
    run_pointwise,
    run_template,
    socket,
)
from torch_backplane.planning.call import as_meta


def _check(self: torch.Tensor, *indices: torch.Tensor) -> None:
    """Leaves to the CPU what the kernels do not take."""
    for index in indices:
        if index.dtype not in (torch.int64, torch.int32):
            raise RunOnCPU(f"indices of {index.dtype}".replace("torch.", ""))
        if index.device != self.device:
            raise RunOnCPU("indices on another device")


# What PyTorch refuses is left to the CPU, which has the words for it: everything that sizes alone tell, so also places
# in a dimension without elements, which kernels would only report at the next synchronization.


def _check_dim(self: torch.Tensor, dim: int, *indices: torch.Tensor) -> None:
    rank = max(self.dim(), 1)
    if not -rank <= dim < rank:
        raise RunOnCPU("a dimension that is none")
    if any(index.numel() for index in indices) and self.dim() and not self.shape[dim]:
        raise RunOnCPU("places in a dimension without elements")


def _check_places(self: torch.Tensor, dim: int, index: torch.Tensor, source: Any = None) -> None:
    """For gather and scatter; tensors without dimensions have been given one."""
    _check_dim(self, dim, index)
    if not index.numel():
        return
    ranks = {one.dim() for one in (self, index, source) if isinstance(one, torch.Tensor)}
    if len(ranks) > 1 or any(
        size > most for d, (size, most) in enumerate(zip(index.shape, self.shape, strict=True)) if d != dim % self.dim()
    ):
        raise RunOnCPU("an index that is larger than the tensor")
    if isinstance(source, torch.Tensor) and any(map(compare.gt, index.shape, source.shape)):
        raise RunOnCPU("an index that is larger than its source")


def _check_slices(self: torch.Tensor, dim: int, index: torch.Tensor, source: Any = None) -> None:
    """For index_select, index_add and the like."""
    _check_dim(self, dim, index)
    if index.dim() > 1 or (self.dim() == 0 and index.numel() != 1):
        raise RunOnCPU("an index that is no vector, or other than one for a tensor without dimensions")
    if isinstance(source, torch.Tensor):
        shape = list(self.shape)
        if shape:
            shape[dim] = index.numel()
        if list(source.shape) != shape:
            raise RunOnCPU("slices of another shape")


def _with_dims(tensor: Any) -> Any:
    """One dimension for a tensor that has none; numbers as they are."""
    return tensor.view(1) if isinstance(tensor, torch.Tensor) and not tensor.dim() else tensor


def _read(
    name: str, out: torch.Tensor, self: torch.Tensor, kept: Sequence[int], indices: Sequence[Index], wraps: bool = False
) -> torch.Tensor:
    if out.numel():
        words = error_words(out.device)
        run_template(read, out.device, out, self, kept, indices, words, name, wraps=wraps, name=name)
    return out


def _write(name: str, self: torch.Tensor, source: Any, shape: Sequence[int], *arguments: Any, **options: Any) -> None:
    if 0 in shape:
        return
    check_number(source, self.dtype)
    if isinstance(source, torch.Tensor) and source.dtype != self.dtype:
        raise RunOnCPU(f"{source.dtype} into {self.dtype}".replace("torch.", ""))
    source = source.fitting(self.dtype) if isinstance(source, Number) else source
    kept, strides, indices = arguments
    if isinstance(options.get("alpha"), Number):
        options["alpha"] = options["alpha"].fitting(self.dtype)
    if self.is_complex():
        _write_parts(name, self, source, shape, kept, strides, indices, **options)
        return
    deterministic = torch.are_deterministic_algorithms_enabled()
    run_template(
        write,
        self.device,
        self,
        source,
        shape,
        kept,
        strides,
        indices,
        error_words(self.device),
        name,
        name=name,
        deterministic=deterministic,
        **options,
    )


def _write_parts(
    name: str,
    self: torch.Tensor,
    source: Any,
    shape: Sequence[int],
    kept: Sequence[int],
    strides: Sequence[int],
    indices: Sequence[Index],
    combine: str = "assign",
    alpha: Any = None,
    **options: Any,
) -> None:
    """Complex numbers, as pairs of real ones in a last dimension."""
    if combine not in ("assign", "add"):
        raise RunOnCPU(f"{combine} of complex numbers")
    if not isinstance(source, torch.Tensor):
        number, source, strides = source, torch.empty((), dtype=self.dtype, device=self.device), [0] * len(shape)
        run_pointwise(lambda value: value, [source], [], [(number, self.dtype)], key="value", name="value")
    if alpha is not None:
        scaled = torch.empty_like(source)
        run_pointwise(lambda x, by: x * by, [scaled], [source], [(alpha, self.dtype)], key="scaled", name="scaled")
        source, strides = scaled, scaled.expand(shape).stride()
    _write(
        name,
        torch.view_as_real(self),
        torch.view_as_real(source),
        [*shape, 2],
        [*(2 * step for step in kept), 1],
        [*(2 * step for step in strides), 1],
        [Index(one.tensor, (*one.strides, 0), 2 * one.step, one.size) for one in indices],
        combine=combine,
        **options,
    )


def _copied(call: Call, self: torch.Tensor) -> torch.Tensor:
    """The result of an operator that changes some elements of self: holding self's elements."""
    (out,) = call.outputs()
    if out is not self:
        out.copy_(self)
    return out


def _slices(self: torch.Tensor, dim: int, index: torch.Tensor) -> tuple[list[int], list[int], list[Index]]:
    """(shape, kept, indices) where each index stands for a whole slice of self, which has dimensions, along dim."""
    shape, kept = list(self.shape), list(self.stride())
    dim %= self.dim()
    shape[dim], kept[dim] = index.numel(), 0
    strides = tuple(_step(index) if d == dim else 0 for d in range(self.dim()))
    return shape, kept, [Index(index, strides, self.stride(dim), self.size(dim))]


def _step(index: torch.Tensor) -> int:
    """The stride of an index of one dimension or none."""
    return index.stride(0) if index.dim() else 0


def _along(self: torch.Tensor, dim: int, index: torch.Tensor) -> tuple[list[int], list[Index]]:
    """(kept, indices) where an element of index, which has self's rank of 1 or more, replaces the one in dim."""
    dim %= self.dim()
    kept = [0 if d == dim else step for d, step in enumerate(self.stride())]
    return kept, [Index(index, index.stride(), self.stride(dim), self.size(dim))]


@operator("index_select", dtypes="complex")
def index_select(call: Call, self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    _check(self, index)
    _check_slices(self, dim, index)
    check_same_dtype(call, self.dtype)
    call.check_apart()
    (out,) = call.outputs()
    self = _with_dims(self)
    _, kept, indices = _slices(self, dim, index)
    _read("index_select", _with_dims(out), self, kept, indices)
    return out


@operator("gather", dtypes="complex")
def gather(call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, sparse_grad: bool) -> torch.Tensor:
    _check(self, index)
    given, index = _with_dims(self), _with_dims(index)
    _check_places(given, dim, index)
    (out,) = call.outputs()
    if out.numel():
        _read("gather", _with_dims(out), given, *_along(given, dim, index))
    return out


@operator("put_", variants=False, dtypes="complex")
def put_(call: Call, self: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool) -> torch.Tensor:
    _check(self, index)
    if index.dtype != torch.int64 or source.dtype != self.dtype or source.numel() != index.numel():
        raise RunOnCPU("indices that are not int64, or another dtype or number of elements")
    if source.device != self.device or (self.numel() == 0 and index.numel()):
        raise RunOnCPU("elements on another device, or no places for them")
    socket.check_overlaps([self], [])
    if index.numel() == 0:
        return self
    values = (source.clone() if same_storage(self, source) else source).reshape(-1)
    places = index.reshape(-1)
    flat = self.reshape(-1)  # a view where the elements are at one distance from each other
    indices = [Index(places, places.stride(), flat.stride(0), flat.numel())]
    combine = "add" if accumulate else "assign"
    _write("put_", flat, values, values.shape, [0], values.stride(), indices, combine=combine, wraps=True)
    return self if same_storage(self, flat) else self.copy_(flat.view(self.shape))


@operator("take", dtypes="complex")
def take(call: Call, self: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    _check(self, index)
    check_same_dtype(call, self.dtype)
    call.check_apart()
    (out,) = call.outputs()
    flat = self.reshape(-1)  # a view where the elements are at one distance from each other
    kept, indices = [0] * index.dim(), [Index(index, index.stride(), flat.stride(0), flat.numel())]
    return _read("take", out, flat, kept, indices, wraps=True)


@operator("embedding", dtypes="complex")
def embedding(
    call: Call, weight: torch.Tensor, index: torch.Tensor, padding_idx: int, scale_by_freq: bool, sparse: bool
) -> torch.Tensor:
    _check(weight, index)
    if weight.dim() != 2:
        raise RunOnCPU("weights that are no matrix")
    _check_dim(weight, 0, index)
    (out,) = call.outputs()
    indices = [Index(index, (*index.stride(), 0), weight.stride(0), weight.size(0))]
    return _read("embedding", out, weight, [0] * index.dim() + [weight.stride(1)], indices)


@operator("embedding_dense_backward", dtypes="complex")
def embedding_dense_backward(
    call: Call, grad: torch.Tensor, index: torch.Tensor, num_weights: int, padding_idx: int, scale_by_freq: bool
) -> torch.Tensor:
    _check(grad, index)
    (out,) = call.outputs()
    out.zero_()
    if not out.numel():
        return out
    rows, flat = grad.reshape(index.numel(), out.shape[-1]), index.reshape(-1)
    if scale_by_freq:
        ones = torch.ones_like(flat, dtype=torch.float32)
        counts = ones.new_zeros(num_weights).index_add_(0, flat, ones)
        rows = rows * counts.index_select(0, flat).reciprocal().to(rows.dtype).unsqueeze(1)
    indices = [Index(flat, (flat.stride(0), 0), out.stride(0), num_weights)]
    skip = padding_idx if padding_idx >= 0 else None
    arguments = (rows.shape, (0, out.stride(1)), rows.stride(), indices)
    _write("embedding_dense_backward", out, rows, *arguments, combine="add", skip=skip)
    return out


# scatter and its like: an index for each element

_REDUCE = {"add": "add", "sum": "add", "multiply": "multiply", "prod": "multiply", "amin": "amin", "amax": "amax"}


def _check_reduction(reduce: str, known: Sequence[str]) -> None:
    if reduce not in known:
        raise RunOnCPU("an unknown reduction")  # for PyTorch's error


def _scatter(call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: Any, combine: str) -> torch.Tensor:
    _check(self, index)
    index, source = _with_dims(index), _with_dims(source)
    _check_places(_with_dims(self), dim, index, source)
    out = _copied(call, self)
    if index.numel():
        strides = source.stride() if isinstance(source, torch.Tensor) else ()
        to = _with_dims(out)
        kept, indices = _along(to, dim, index)
        _write("scatter", to, source, index.shape, kept, strides, indices, combine=combine)
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
    return _scatter(call, self, dim, index, source, _REDUCE[reduce])


@operator("scatter_reduce.two")
def scatter_reduce_two(
    call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, include_self: bool
) -> torch.Tensor:
    _check_reduction(reduce, ("sum", "prod", "mean", "amin", "amax"))
    if include_self and reduce != "mean":
        return _scatter(call, self, dim, index, source, _REDUCE[reduce])
    _check(self, index)
    _check_places(*(_with_dims(self), dim, _with_dims(index), _with_dims(source)))
    if self.dtype == torch.bool or source.dtype != self.dtype:
        raise RunOnCPU(f"{source.dtype} into {self.dtype}".replace("torch.", ""))
    out = _copied(call, self)
    if not include_self:
        out.scatter_(dim, index, _identity(reduce, self.dtype))
    out.scatter_reduce_(dim, index, source, "sum" if reduce == "mean" else reduce)
    if reduce == "mean":
        counts = torch.ones_like(out) if include_self else torch.zeros_like(out)
        counts.scatter_add_(dim, index, torch.ones_like(source)).clamp_(min=1)
        out.div_(counts, rounding_mode=None if out.is_floating_point() else "floor")
    return out


def _identity(reduce: str, dtype: torch.dtype) -> int | float:
    """What a reduction begins with that leaves out what was there."""
    if reduce in ("amin", "amax"):
        if dtype.is_floating_point:
            return math.inf if reduce == "amin" else -math.inf
        least, greatest = integer_range(dtype)
        return greatest if reduce == "amin" else least
    return 1 if reduce == "prod" else 0


# index_add and its like: an index for each slice


def _write_slices(
    name: str, call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: Any, **options: Any
) -> torch.Tensor:
    _check(self, index)
    _check_slices(self, dim, index, source)
    out = _copied(call, self)
    to, source = _with_dims(out), _with_dims(source)
    shape, kept, indices = _slices(to, dim, index)
    strides = source.stride() if isinstance(source, torch.Tensor) else ()
    _write(name, to, source, shape, kept, strides, indices, **options)
    return out


@operator("index_add", dtypes="complex")
def index_add(
    call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, alpha: Number
) -> torch.Tensor:
    _check(self, index)
    check_same_dtype(call, self.dtype)
    _check_slices(self, dim, index, source)
    # Without alpha: the meta kernel refuses fractions, which PyTorch's kernels take to be integers.
    call.outputs(like=[torch.ops.aten.index_add.default(as_meta(self), dim, as_meta(index), as_meta(source))])
    return _write_slices("index_add", call, self, dim, index, source, combine="add", alpha=alpha)


@operator("index_copy", dtypes="complex")
def index_copy(call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return _write_slices("index_copy", call, self, dim, index, source)


@operator("index_reduce")
def index_reduce(
    call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, include_self: bool
) -> torch.Tensor:
    _check(self, index)
    if reduce not in ("prod", "mean", "amax", "amin") or self.dtype == torch.bool or source.dtype != self.dtype:
        raise RunOnCPU("what index_reduce does not take")
    _check_slices(self, dim, index, source)
    if include_self and reduce != "mean":
        return _write_slices("index_reduce", call, self, dim, index, source, combine=_REDUCE[reduce])
    out = _copied(call, self)
    if not include_self:
        out.index_fill_(dim, index.long(), _identity(reduce, self.dtype))
    if reduce != "mean":
        return out.index_reduce_(dim, index, source, reduce)
    out.index_add_(dim, index, source)
    counts = torch.ones_like(out) if include_self else torch.zeros_like(out)
    counts.index_add_(dim, index, torch.ones_like(source)).clamp_(min=1)
    return out.div_(counts, rounding_mode=None if out.is_floating_point() else "floor")


@operator("index_fill.int_Scalar", "index_fill.int_Tensor", dtypes="complex")
def index_fill(call: Call, self: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    of_tensor = isinstance(value, Number) and value.tensor is not None  # which the meta kernel refuses
    if index.dtype != torch.int64:
        raise RunOnCPU(f"an index of {index.dtype}".replace("torch.", ""))  # which refuses it
    if isinstance(value, Number) and not of_tensor:
        check_number(value, self.dtype)
        if not self.numel() or not index.numel():
            socket.check_number(value.fitting(self.dtype))
    expanded = call.is_in_place and each_once(self) is not self
    if expanded:
        warn_of_expanded("index_fill_")
    if of_tensor or expanded:
        like = [torch.empty_like(as_meta(self))] if of_tensor else call.meta(call.functional)
        call.outputs(like=like, expanded=call.is_in_place)
    return _write_slices("index_fill", call, self, dim, index, value, wraps=True)


# Advanced indexing


def _check_indices(self: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> None:
    given = [index for index in indices if index is not None]
    _check(self, *(index for index in given if index.dtype not in MASKS))
    if not given:
        raise RunOnCPU("no indices")
    check_masks(self, indices)


def _advanced(self: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> tuple[list[int], list[int], list[Index]]:
    """(shape, kept, indices) of self[indices]: index dimensions stand where they were if adjacent, else in front.

    Raises PyTorch's errors itself: masks have been counted by now, and a planner that has launched is past the CPU.
    """
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    if len(indices) > self.dim():
        raise IndexError(f"too many indices for tensor of dimension {self.dim()} (got {len(indices)})")
    shapes = [index.shape for index in given.values()]
    try:
        common = socket.broadcast_shapes(*shapes)
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
    return _read("index", out, self, kept, found, wraps=True)


@operator("_index_put_impl_", variants=False, dtypes="complex")
def _index_put_impl_(
    call: Call, self: torch.Tensor, indices: list[torch.Tensor | None], values: Any, accumulate: bool, unsafe: bool
) -> torch.Tensor:
    """A tensor without dimensions for values may be the CPU's, as in PyTorch."""
    is_tensor = isinstance(values, torch.Tensor)
    if values.dtype != self.dtype or (is_tensor and values.device != self.device):
        raise RunOnCPU("values of another dtype, or on another device")
    given, distinct = self, False
    _check_indices(self, indices)
    if has_masks(indices):
        mask = only_mask(self, indices)
        if mask is not None and not accumulate and (not is_tensor or values.numel() == 1):
            return fill(self, mask, values)
        if is_tensor and each_once(self) is self:
            socket.check_overlaps([self], [values])
        distinct = mask is not None
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
    _write("index_put_", given, values, shape, kept, strides, found, combine=combine, wraps=True, distinct=distinct)
    return self
