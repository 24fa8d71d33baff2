"""Sizes and strides as PyTorch computes them in C++, for integers and for symbols (symbols.py).

With symbols, each comparison leaves a guard, so a result is valid for every call that passes the guards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Dimensions of the channels-last formats from the innermost one on, by the number of dimensions.
CHANNELS_LAST = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}


def number_now(number: Any) -> Any:
    """The number's value in this call, without a guard: no decision may depend on it."""
    return number.node.value if isinstance(number, SYMBOLS) else number


def contiguous(sizes: Sequence[Any]) -> list[Any]:
    """The strides of a new contiguous tensor. A size of 0 counts as 1."""
    return in_order(sizes, range(len(sizes) - 1, -1, -1))


def laid_out(sizes: Sequence[Any], memory_format: torch.memory_format) -> list[Any]:
    """The strides of a new tensor in a memory format that matches its number of dimensions."""
    if memory_format == torch.contiguous_format:
        return contiguous(sizes)
    if any(size == 0 for size in sizes):  # unlike in `contiguous`, a size of 0 counts as 0
        strides: list[Any] = [1] * len(sizes)
        inner, *others = CHANNELS_LAST[len(sizes)]
        for dim in others:
            strides[dim] = strides[inner] * sizes[inner]
            inner = dim
        return strides
    return in_order(sizes, CHANNELS_LAST[len(sizes)])


def suggested(sizes: Sequence[Any], strides: Sequence[Any]) -> torch.memory_format:
    """The memory format that C++'s Tensor::suggest_memory_format returns."""
    if len(sizes) in CHANNELS_LAST and has_channels_last_strides(sizes, strides):
        return torch.channels_last if len(sizes) == 4 else torch.channels_last_3d
    return torch.contiguous_format


def in_order(sizes: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """The strides of a dense tensor whose dimensions, from the innermost one on, are `order`."""
    strides: list[Any] = [1] * len(sizes)
    step: Any = 1
    for dim in order:
        strides[dim] = step
        if not (isinstance(sizes[dim], int) and sizes[dim] == 1):
            step = step * (sizes[dim] if sizes[dim] != 0 else 1)
    return strides


def are_adjacent(sizes: Sequence[Any], strides: Sequence[Any], order: Sequence[int]) -> bool:
    """Whether a tensor is dense in this order of dimensions. Dimensions of size 1 can have any stride."""
    expected: Any = 1
    for dim in order:
        if sizes[dim] != 1:
            if strides[dim] != expected:
                return False
            expected = expected * sizes[dim]
    return True


def is_contiguous(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    """As Tensor.is_contiguous: true for tensors without elements."""
    return are_adjacent(sizes, strides, range(len(sizes) - 1, -1, -1)) or any(size == 0 for size in sizes)


def is_channels_last(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    """As Tensor.is_contiguous(memory_format=torch.channels_last), or channels_last_3d."""
    return len(sizes) in CHANNELS_LAST and are_adjacent(sizes, strides, CHANNELS_LAST[len(sizes)])


def has_channels_last_strides(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether the strides are in channels-last order, as Tensor::suggest_memory_format tests it (MemoryFormat.h)."""
    if strides[1] == 0:
        return False
    least: Any = 0
    for dim in CHANNELS_LAST[len(sizes)]:
        if sizes[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * sizes[dim] if sizes[dim] > 1 else strides[dim]
    return True


def is_dense(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    """As Tensor.is_non_overlapping_and_dense: dense in some order of dimensions, or without elements."""
    if any(size == 0 for size in sizes):
        return True
    counted = sorted((dim for dim in range(len(sizes)) if sizes[dim] > 1), key=lambda dim: number_now(strides[dim]))
    if are_adjacent(sizes, strides, counted):
        return True
    # Not dense in the order of strides. Guard that order, as the answer depends on it.
    for one, other in itertools.pairwise(counted):
        if not strides[one] <= strides[other]:
            raise AssertionError("the strides are not in sorted order")
    return False


def like(sizes: Sequence[Any], strides: Sequence[Any]) -> list[Any]:
    """The strides that torch.empty_like gives: the same if dense, else dense ones in the same order."""
    return list(strides) if is_dense(sizes, strides) else iterator_order(sizes, [strides])


def broadcast_shapes(shapes: Sequence[Sequence[Any]]) -> list[Any]:
    """The broadcast shape. Raises PyTorch's RuntimeError if there is none."""
    found: list[Any] = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for dim in range(-len(shape), 0):
            one, other = found[dim], shape[dim]
            if one is other:
                continue
            if isinstance(one, int) and one == 1:
                found[dim] = other
            elif one != other and other != 1:
                if one != 1:
                    raise RuntimeError(
                        f"The size of tensor a ({one}) must match the size of tensor b ({other}) at non-singleton "
                        f"dimension {len(found) + dim}"
                    )
                found[dim] = other
    return found


def iterator(shape: Sequence[Any], operands: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> list[Any]:
    """The strides that TensorIterator gives a result of this shape.

    Args:
        shape: the broadcast shape.
        operands: (sizes, strides) of each operand.
    """
    same = all(len(sizes) == len(shape) and all(map(_equal, sizes, shape)) for sizes, _ in operands)
    if same:
        for is_laid_out, order in ((is_contiguous, range(len(shape) - 1, -1, -1)),
                                   (is_channels_last, CHANNELS_LAST.get(len(shape), ()))):  # fmt: skip
            if all(is_laid_out(sizes, strides) for sizes, strides in operands):
                return in_order(shape, order)
        first = operands[0][1]
        if all(all(map(_equal, strides, first)) for _, strides in operands) and is_dense(shape, first):
            return list(first)
    broadcast = []
    for sizes, strides in operands:
        missing = len(shape) - len(sizes)
        own = zip(sizes, strides, shape[missing:], strict=True)
        broadcast.append([0] * missing + [0 if size == 1 and wanted != 1 else stride for size, stride, wanted in own])
    return iterator_order(shape, broadcast)


def iterator_order(shape: Sequence[Any], operands: Sequence[Sequence[Any]]) -> list[Any]:
    """Dense strides with the dimensions in the order of the operands' strides.

    The first operand whose strides of two dimensions differ decides their order, as in TensorIterator.
    """

    def compare(one: int, other: int) -> int:
        for strides in operands:
            if strides[one] == 0 or strides[other] == 0:
                continue
            if strides[one] != strides[other]:
                return -1 if strides[one] < strides[other] else 1
            if shape[one] > shape[other]:
                return 1
        return 0

    order = list(range(len(shape)))[::-1]
    for last in range(1, len(order)):  # insertion sort as in TensorIterator: 0 means undecided, not equal
        at = last
        for before in range(last - 1, -1, -1):
            comparison = compare(order[before], order[at])
            if comparison > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif comparison < 0:
                break
    return in_order(shape, order)


def _equal(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


def viewed(sizes: Sequence[Any], strides: Sequence[Any], wanted: Sequence[Any]) -> list[Any] | None:
    """The strides of a view with the sizes `wanted`; None if that needs a copy (at::detail::computeStride)."""
    if any(size == 0 for size in sizes):
        alike = len(sizes) == len(wanted) and all(map(_equal, sizes, wanted))
        return list(strides) if alike else contiguous(wanted)
    if (not strides or strides[-1] == 1) and is_contiguous(sizes, strides):
        return contiguous(wanted)
    made: list[Any] = [0] * len(wanted)
    at = len(wanted) - 1
    count: Any = 1
    placed: Any = 1
    base: Any = strides[-1] if strides else 1
    for dim in range(len(sizes) - 1, -1, -1):
        count = count * sizes[dim]
        if dim == 0 or (sizes[dim - 1] != 1 and strides[dim - 1] != count * base):  # end of a dense run of dimensions
            while at >= 0 and (placed < count or wanted[at] == 1):
                made[at] = placed * base
                placed = placed * wanted[at]
                at -= 1
            if placed != count:
                return None
            if dim > 0:
                base = strides[dim - 1]
                count = placed = 1
    return made if at == -1 else None
