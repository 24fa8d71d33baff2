"""Fourier transforms by a hardware library of the device's driver (the family fft)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_backplane.planning import LibraryCall, Transform, runtime, same_storage

MAX_DIMENSIONS = 3


def why_not(x: torch.Tensor, out: torch.Tensor, dims: Sequence[int], inverse: bool) -> str | None:
    """Why no library transforms x along `dims` to `out`, in words that follow «it»; None if one does."""
    absent = LibraryCall(x.device, "fft", x.dtype.to_real()).why_not()
    if absent is not None:
        return absent
    if len(dims) > MAX_DIMENSIONS:
        return f"transforms along up to {MAX_DIMENSIONS} dimensions"
    whole = x if out.is_complex() else out
    if not all(whole.shape[dim] > 1 for dim in dims):
        return "transforms along dimensions of 2 elements or more"
    return next(filter(None, (call.why_not() for call in _calls(x, out, dims, inverse))), None)


def workspace(x: torch.Tensor, out: torch.Tensor, dims: Sequence[int], inverse: bool) -> int:
    """Bytes of the routine's workspace."""
    return sum(call.workspace() for call in _calls(x, out, dims, inverse))


def cost(x: torch.Tensor, out: torch.Tensor, dims: Sequence[int], inverse: bool) -> int | None:
    """The routine's cost (`planning.costs`); None if the library does not state it."""
    costs = [call.cost() for call in _calls(x, out, dims, inverse)]
    return None if None in costs else max(one for one in costs if one is not None)


def transform(out: torch.Tensor, x: torch.Tensor, dims: Sequence[int], scale: float, inverse: bool = False) -> None:
    """out = scale · the transform of x along `dims`. `why_not` must have returned None.

    If x is real, `out` has all elements of the last of `dims` or only half of them. If `out` is real, x has half.
    """
    *first, last = dims
    if not out.is_complex():
        if first:
            whole, x = x, torch.empty_like(x)
            _along(x, whole, first, Transform.COMPLEX, inverse)
        x = x.movedim(last, -1).clone(memory_format=torch.contiguous_format)
        _make_ends_real(x, out.shape[last])
        _along(out, x.movedim(-1, last), [last], Transform.HALF_TO_REAL, inverse, scale)
    elif x.is_complex() or out.shape[last] == x.shape[last]:
        _along(out, x.to(out.dtype), dims, Transform.COMPLEX, inverse, scale)
    else:
        _along(out, x, dims, Transform.REAL_TO_HALF, inverse, scale)


def _make_ends_real(half: torch.Tensor, size: int) -> None:
    """Clears the imaginary parts that PyTorch ignores, in place: a transform of real numbers begins with a real number,
    and has a real one in the middle if `size` is even. Nothing else may use the memory of `half`.
    """
    imaginary = torch.view_as_real(half).select(-1, 1)
    imaginary.select(-1, 0).zero_()
    if size % 2 == 0:
        imaginary.select(-1, -1).zero_()


def _along(
    out: torch.Tensor, x: torch.Tensor, dims: Sequence[int], kind: Transform, inverse: bool, scale: float = 1.0
) -> None:
    """Transforms along `dims`. The routine needs them as the innermost dimensions, so operands can be copied."""
    others = sorted((one for one in range(out.dim()) if one not in dims), key=out.stride, reverse=True)
    order = [*others, *dims]
    source, target = x.permute(order).contiguous(), out.permute(order)
    size = max(x.itemsize, out.itemsize)  # of a complex number
    if not runtime.is_aligned(source, size):
        source = source.clone()
    in_place = target.is_contiguous() and runtime.is_aligned(target, size) and not same_storage(target, source)
    result = target if in_place else torch.empty(target.shape, dtype=out.dtype, device=out.device)
    call = _call(x if out.is_complex() else out, dims, kind, inverse)
    call.run([result, source], written=2 if kind == Transform.HALF_TO_REAL else 1)
    if scale != 1:
        torch.mul(result, scale, out=target)
    elif not in_place:
        target.copy_(result)


def _calls(x: torch.Tensor, out: torch.Tensor, dims: Sequence[int], inverse: bool) -> list[LibraryCall]:
    """The library calls of `transform`."""
    if not out.is_complex():
        first = [_call(x, dims[:-1], Transform.COMPLEX, inverse)] if len(dims) > 1 else []
        return [*first, _call(out, dims[-1:], Transform.HALF_TO_REAL, inverse)]
    halves = not x.is_complex() and out.shape[dims[-1]] != x.shape[dims[-1]]
    return [_call(x, dims, Transform.REAL_TO_HALF if halves else Transform.COMPLEX, inverse)]


def _call(whole: torch.Tensor, dims: Sequence[int], kind: Transform, inverse: bool) -> LibraryCall:
    """A call for a transform along `dims`. `whole` is the side that has all elements."""

    def integers() -> dict[str, int]:
        batch = math.prod(size for dim, size in enumerate(whole.shape) if dim not in dims)
        outer, middle, inner = [1] * (MAX_DIMENSIONS - len(dims)) + [whole.shape[dim] for dim in dims]
        found = {"kind": int(kind), "inverse": int(inverse), "batch": batch}
        return found | {"outer": outer, "middle": middle, "inner": inner}

    return LibraryCall(whole.device, "fft", whole.dtype.to_real(), integers)
