"""Fourier transforms by a library for the hardware that the driver brings (`drivers.base.TransformLibrary`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from torch_backplane.planning import QueueFunction, same_storage, transform_library

# What is transformed into what, and how many integers a call has: see TransformLibrary.
COMPLEX, TO_HALF, FROM_HALF = 0, 1, 2
_INTEGERS = 6
MOST_DIMENSIONS = 3


def why_not(x: torch.Tensor, out: torch.Tensor, dims: Sequence[int]) -> str | None:
    """Why the library does not transform x along `dims` to `out`, in words that go on with «it»; None where it does."""
    library = transform_library(x.device)
    if library is None:
        return "is not there for this device"
    if x.dtype.to_real() not in library.transforms:
        return f"({library.name}) has no {x.dtype}".replace("torch.", "")
    if len(dims) > MOST_DIMENSIONS:
        return f"transforms along up to {MOST_DIMENSIONS} dimensions"
    whole = x if out.is_complex() else out
    if not all(1 < whole.shape[dim] <= library.most_elements for dim in dims):
        return f"transforms along 2 to {library.most_elements} elements"
    if not all(one.numel() * one.element_size() <= library.most_bytes for one in (x, out)):
        return f"transforms up to {library.most_bytes} bytes"
    return None


def transform(out: torch.Tensor, x: torch.Tensor, dims: Sequence[int], scale: float, inverse: bool = False) -> None:
    """out = scale · the transform of x along `dims`, of what `why_not` has nothing against.

    Where x is real, `out` may have all of the last of `dims`, or half of it; where `out` is, x has half of it.
    """
    *first, last = dims
    if not out.is_complex():
        if first:
            whole, x = x, torch.empty_like(x)
            _along(x, whole, first, COMPLEX, inverse)
        x = x.movedim(last, -1).clone(memory_format=torch.contiguous_format)
        _make_ends_real(x, out.shape[last])
        _along(out, x.movedim(-1, last), [last], FROM_HALF, inverse, scale)
    elif x.is_complex() or out.shape[last] == x.shape[last]:
        _along(out, x.to(out.dtype), dims, COMPLEX, inverse, scale)
    else:
        _along(out, x, dims, TO_HALF, inverse, scale)


def _make_ends_real(half: torch.Tensor, size: int) -> None:
    """Of memory that nobody else has. The transform of real numbers begins with a real one, and has one in the middle:
    PyTorch does not look at their imaginary parts.
    """
    imaginary = torch.view_as_real(half).select(-1, 1)
    imaginary.select(-1, 0).zero_()
    if size % 2 == 0:
        imaginary.select(-1, -1).zero_()


def _along(
    out: torch.Tensor, x: torch.Tensor, dims: Sequence[int], what: int, inverse: bool, scale: float = 1.0
) -> None:
    """The innermost ones are transformed: others are brought there, and results to where they belong."""
    others = sorted((one for one in range(out.dim()) if one not in dims), key=out.stride, reverse=True)
    order = [*others, *dims]
    source, target = x.permute(order).contiguous(), out.permute(order)
    in_place = target.is_contiguous() and not same_storage(target, source)
    result = target if in_place else torch.empty(target.shape, dtype=out.dtype, device=out.device)
    batch = math.prod(source.shape[: len(others)])
    sizes = (source if out.is_complex() else target).shape[len(others) :]
    absent = [1] * (MOST_DIMENSIONS - len(dims))
    _function(out.device, out.dtype.to_real(), what)(result, source, what, int(inverse), batch, *absent, *sizes)
    if scale != 1:
        torch.mul(result, scale, out=target)
    elif not in_place:
        target.copy_(result)


@cache
def _function(device: torch.device, dtype: torch.dtype, what: int) -> QueueFunction:
    library = transform_library(device)
    assert library is not None
    parameters = ("output", "output" if what == FROM_HALF else "input", *[torch.int64] * _INTEGERS)
    return QueueFunction(f"{library.name}'s transform", library.transforms[dtype], *parameters, explain=library.explain)
