"""Views, new tensors and copies of a trace: PyTorch's C++ functions, reimplemented for symbols."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torch_backplane import _C
from torch_backplane.planning import registry
from torch_backplane.planning import strides as layouts
from torch_backplane.planning.symbols import Untraceable, quantity

aten = torch.ops.aten

def _empty(tracer: Any, sizes: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
           pin_memory: Any = None, memory_format: Any = None) -> Any:  # fmt: skip
    strides = None if memory_format is None else layouts.laid_out(sizes, memory_format)
    return tracer.empty(sizes, strides, dtype or torch.get_default_dtype(), device)


def _empty_strided(tracer: Any, sizes: Any, strides: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> Any:  # fmt: skip
    return tracer.empty(sizes, strides, dtype or torch.get_default_dtype(), device)


def _empty_like(tracer: Any, tensor: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
                pin_memory: Any = None, memory_format: Any = None) -> Any:  # fmt: skip
    if memory_format in (None, torch.preserve_format):
        strides = layouts.like(tensor.shape, tensor.stride())
    else:
        strides = layouts.laid_out(tensor.shape, memory_format)
    return tracer.empty(tensor.shape, strides, dtype or tensor.dtype, device or tensor.device)


def _new_empty(tracer: Any, tensor: Any, sizes: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
               pin_memory: Any = None) -> Any:  # fmt: skip
    return tracer.empty(sizes, None, dtype or tensor.dtype, device or tensor.device)


def _filled(make: Callable[..., Any]) -> Callable[..., Any]:
    """Turns a function that creates a tensor into one that also fills it with a number, its last argument."""

    def filled(tracer: Any, *arguments: Any, **options: Any) -> Any:
        *others, number = arguments
        return make(tracer, *others, **options).fill_(number)

    return filled


def _zeroed(make: Callable[..., Any]) -> Callable[..., Any]:
    def zeroed(tracer: Any, *arguments: Any, **options: Any) -> Any:
        return make(tracer, *arguments, **options).zero_()

    return zeroed


def _scalar_tensor(tracer: Any, number: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> Any:  # fmt: skip
    made = tracer.empty((), None, dtype or torch.get_default_dtype(), device)
    return made if made.memory.base == "meta" else made.fill_(number)


def _viewed(tracer: Any, tensor: Any, sizes: Any, strides: Any, offset: Any = None, dtype: Any = None) -> Any:
    offset = tensor.storage_offset() if offset is None else offset
    made = tracer.make(tensor.memory, sizes, strides, offset, dtype or tensor.dtype, tensor.device)
    if tensor.is_conj():
        torch._C._set_conj(made, True)
    if tensor.is_neg():
        torch._C._set_neg(made, True)
    return made


def _without_lazy_bits(tracer: Any, tensor: Any) -> Any:
    """Returns an alias without the conjugate and negative bits."""
    return tracer.make(
        tensor.memory, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
    )


def _is_inferred(size: Any) -> bool:
    return bool(size == -1)  # leaves a guard, as a symbol that comes from an argument can be -1


def _view(tracer: Any, tensor: Any, sizes: Sequence[Any]) -> Any:
    sizes = list(sizes)
    for position, size in enumerate(sizes):
        if _is_inferred(size):
            sizes[position] = tensor.numel() // math.prod(sizes[:position] + sizes[position + 1 :])
    if tensor.numel() != math.prod(sizes):
        raise RuntimeError("the view has another number of elements")
    strides = layouts.viewed(tensor.shape, tensor.stride(), sizes)
    if strides is None:
        raise RuntimeError("the view is not compatible with the strides")
    return _viewed(tracer, tensor, sizes, strides)


def _reshape_alias(tracer: Any, tensor: Any, sizes: Any, strides: Any) -> Any:
    return _viewed(tracer, tensor, sizes, strides)


def _expand(tracer: Any, tensor: Any, sizes: Sequence[Any], implicit: bool = False) -> Any:
    missing = len(sizes) - tensor.dim()
    if missing < 0 or (tensor.dim() == 0 and any(size < 0 for size in sizes)):
        raise RuntimeError("the sizes do not match")
    if tensor.dim() == 0:
        return _viewed(tracer, tensor, sizes, [0] * len(sizes))
    made: list[tuple[Any, Any]] = []  # from the innermost one on
    for dim in range(len(sizes) - 1, -1, -1):
        if dim >= missing:
            size, step = tensor.shape[dim - missing], tensor.stride(dim - missing)
        else:
            size, step = 1, made[-1][0] * made[-1][1] if made else 1
        is_inferred = _is_inferred(sizes[dim])
        if is_inferred and dim < missing:
            raise RuntimeError("the size of a new dimension is -1")
        wanted = size if is_inferred else sizes[dim]
        if wanted != size:
            if size != 1:
                raise RuntimeError("the sizes do not match")
            size, step = wanted, 0
        made.append((size, step))
    return _viewed(tracer, tensor, [size for size, _ in reversed(made)], [step for _, step in reversed(made)])


def _permute(tracer: Any, tensor: Any, dims: Sequence[int]) -> Any:
    return _viewed(tracer, tensor, [tensor.shape[dim] for dim in dims], [tensor.stride(dim) for dim in dims])


def _transpose(tracer: Any, tensor: Any, one: int, other: int) -> Any:
    dims = list(range(tensor.dim()))
    if dims:
        dims[one], dims[other] = dims[other], dims[one]
    return _permute(tracer, tensor, dims)


def _t(tracer: Any, tensor: Any) -> Any:
    return _transpose(tracer, tensor, 0, 1) if tensor.dim() == 2 else tensor


def _select(tracer: Any, tensor: Any, dim: int, index: Any) -> Any:
    dim %= tensor.dim()
    sizes, strides = list(tensor.shape), list(tensor.stride())
    size, step = sizes.pop(dim), strides.pop(dim)
    if not (index < size and index >= -size):
        raise IndexError("the index is out of range")
    index = index if index >= 0 else index + size
    return _viewed(tracer, tensor, sizes, strides, tensor.storage_offset() + index * step)


def _slice(tracer: Any, tensor: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    dim %= tensor.dim()
    size = tensor.shape[dim]

    def within(position: Any, least: Any) -> Any:
        if isinstance(position, int) and position == 2**63 - 1:
            return size
        position = position if position >= 0 else position + size
        if position < least:
            return least
        return position if position < size else size

    if step <= 0:
        raise ValueError("the step is not positive")
    start = 0 if start is None else within(start, 0)
    end = size if end is None else within(end, start)
    sizes, strides = list(tensor.shape), list(tensor.stride())
    sizes[dim] = (end - start + (step - 1)) // step
    offset = tensor.storage_offset() + start * strides[dim]
    strides[dim] = strides[dim] * step
    return _viewed(tracer, tensor, sizes, strides, offset)


def _unsqueeze(tracer: Any, tensor: Any, dim: int) -> Any:
    dim %= tensor.dim() + 1
    sizes, strides = list(tensor.shape), list(tensor.stride())
    step = sizes[dim] * strides[dim] if dim < tensor.dim() else 1
    sizes.insert(dim, 1)
    strides.insert(dim, step)
    return _viewed(tracer, tensor, sizes, strides)


def _squeeze(tracer: Any, tensor: Any, dims: Any = None) -> Any:
    chosen = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim % tensor.dim() for dim in chosen if tensor.shape[dim] == 1} if tensor.dim() else set()
    return _permute(tracer, tensor, [dim for dim in range(tensor.dim()) if dim not in gone])


def _alias(tracer: Any, tensor: Any) -> Any:
    return _viewed(tracer, tensor, tensor.shape, tensor.stride())


def _diagonal(tracer: Any, tensor: Any, offset: Any = 0, dim1: int = 0, dim2: int = 1) -> Any:
    dim1, dim2 = dim1 % tensor.dim(), dim2 % tensor.dim()
    if dim1 == dim2:
        raise RuntimeError("both dimensions of the diagonal are the same")
    sizes, strides = ([one for dim, one in enumerate(numbers) if dim not in (dim1, dim2)] for numbers in
                      (tensor.shape, tensor.stride()))  # fmt: skip
    rows, columns, row, column = tensor.shape[dim1], tensor.shape[dim2], tensor.stride(dim1), tensor.stride(dim2)
    start = tensor.storage_offset()
    rows, columns = (rows, columns - offset) if offset >= 0 else (rows + offset, columns)
    size = rows if rows < columns else columns
    if size > 0:
        start = start + offset * column if offset >= 0 else start - offset * row
    return _viewed(tracer, tensor, [*sizes, size if size > 0 else 0], [*strides, row + column], start)


def _as_strided(tracer: Any, tensor: Any, sizes: Any, strides: Any, offset: Any = None) -> Any:
    return _viewed(tracer, tensor, sizes, strides, offset)


def _unbind(tracer: Any, tensor: Any, dim: int = 0) -> list[Any]:
    return [_select(tracer, tensor, dim, index) for index in range(tensor.shape[dim])]


def _split_evenly(tracer: Any, tensor: Any, size: Any, dim: int = 0) -> list[Any]:
    whole = tensor.shape[dim]
    if size <= 0:
        raise RuntimeError("the size of the parts is not positive")
    starts = [part * size for part in range(max(1, -(-whole // size)))]
    return [_slice(tracer, tensor, dim, start, start + size) for start in starts]


def _split(tracer: Any, tensor: Any, sizes: Sequence[Any], dim: int = 0) -> list[Any]:
    if sum(sizes) != tensor.shape[dim]:
        raise RuntimeError("the sizes of the parts do not add up to the size of the dimension")
    found, start = [], 0
    for size in sizes:
        found.append(_slice(tracer, tensor, dim, start, start + size))
        start = start + size
    return found


def _view_dtype(tracer: Any, tensor: Any, dtype: torch.dtype) -> Any:
    if dtype.itemsize != tensor.itemsize:
        raise Untraceable("it views a tensor as a dtype of another size")
    return _viewed(tracer, tensor, tensor.shape, tensor.stride(), None, dtype)


def _clone(tracer: Any, tensor: Any, *, memory_format: Any = None) -> Any:
    made = _empty_like(tracer, tensor, memory_format=memory_format)
    made.copy_(tensor)
    return made


def _to_copy(tracer: Any, tensor: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
             pin_memory: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:  # fmt: skip
    if device is not None and torch.device(device) != tensor.device:
        raise Untraceable("it copies to another device")
    made = _empty_like(tracer, tensor, dtype=dtype, memory_format=memory_format)
    made.copy_(tensor)
    return made


class _CopyFacts(NamedTuple):
    """The properties of a copy that csrc/aten/copies.h uses to choose how to copy."""

    to: Any
    source: Any

    def is_alike(self) -> bool:
        to, source = self.to, self.source
        of_one_kind = (to.dtype, to.is_conj(), to.is_neg()) == (source.dtype, source.is_conj(), source.is_neg())
        return of_one_kind and [*to.shape] == [*source.shape] and [*to.stride()] == [*source.stride()]

    def shares_storage(self) -> bool:
        return self.to.memory is self.source.memory

    def starts_alike(self) -> bool:
        return bool(self.to.storage_offset() == self.source.storage_offset())

    def is_dense(self) -> bool:
        return layouts.is_dense(self.to.shape, self.to.stride())


def _copy(tracer: Any, to: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copies as csrc/aten/copy.cpp does."""
    if not hasattr(source, "memory"):
        raise Untraceable("it copies a tensor from outside the call")
    if to is source or to.memory.base == "meta":
        return to
    method = _C.copy_method(_CopyFacts(to, source))
    if method == _C.CopyMethod.Nothing:
        return to
    tracer.check_overlaps([to], [source])
    if to.numel() == 0:
        return to
    if method == _C.CopyMethod.Bytes:
        plain = [tracer.place(_without_lazy_bits(tracer, one)) for one in (to, source)]
        tracer.builder.copy(*plain, quantity(to.numel() * to.itemsize))
        return to
    conjugate, negate = source.is_conj() != to.is_conj(), source.is_neg() != to.is_neg()
    registry.planned["backplane::copy_elements"](
        _without_lazy_bits(tracer, source), _without_lazy_bits(tracer, to), conjugate, negate
    )
    return to


HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _alias, aten.as_strided.default: _as_strided, aten.clone.default: _clone,
    aten.copy_.default: _copy, aten.diagonal.default: _diagonal, aten._to_copy.default: _to_copy,
    aten.detach.default: _alias, aten.empty.memory_format: _empty,
    aten.empty_like.default: _empty_like, aten.empty_strided.default: _empty_strided, aten.expand.default: _expand,
    aten.full.default: _filled(_empty), aten.new_empty.default: _new_empty, aten.new_full.default: _filled(_new_empty),
    aten.new_zeros.default: _zeroed(_new_empty), aten.permute.default: _permute,
    aten._reshape_alias.default: _reshape_alias, aten.scalar_tensor.default: _scalar_tensor, aten.select.int: _select,
    aten.slice.Tensor: _slice, aten.split.Tensor: _split_evenly, aten.split_with_sizes.default: _split,
    aten.squeeze.default: _squeeze, aten.squeeze.dim: _squeeze, aten.squeeze.dims: _squeeze, aten.t.default: _t,
    aten.transpose.int: _transpose, aten.unbind.int: _unbind, aten._unsafe_view.default: _view,
    aten.unsqueeze.default: _unsqueeze, aten.view.default: _view, aten.view.dtype: _view_dtype,
    aten.zeros.default: _zeroed(_empty),
}  # fmt: skip
"""Functions by overload; they take the trace and the overload's arguments."""
