"""Fourier transforms by a library for the hardware that the driver brings (the family fft)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_backplane.planning import LibraryCall, Transform, same_storage

MOST_DIMENSIONS = 3


def why_not(x: torch.Tensor, out: torch.Tensor, dims: Sequence[int], inverse: bool) -> str | None:
    """Why no library transforms x along `dims` to `out`, in words that go on with «it»; None where one does."""
    absent = LibraryCall(x.device, "fft", x.dtype.to_real()).why_not()
    if absent is not None:
        return absent
    if len(dims) > MOST_DIMENSIONS:
        return f"transforms along up to {MOST_DIMENSIONS} dimensions"
    whole = x if out.is_complex() else out
    if not all(whole.shape[dim] > 1 for dim in dims):
        return "transforms along 2 elements and more"
    return next(filter(None, (call.why_not() for call in _calls(x, out, dims, inverse))), None)


def workspace(x: torch.Tensor, out: torch.Tensor, dims: Sequence[int], inverse: bool) -> int:
    """Bytes of the routine's workspace."""
    return sum(call.workspace() for call in _calls(x, out, dims, inverse))


def cost(x: torch.Tensor, out: torch.Tensor, dims: Sequence[int], inverse: bool) -> int | None:
    """The routine's cost (`planning.costs`); None where the library states none."""
    costs = [call.cost() for call in _calls(x, out, dims, inverse)]
    return None if None in costs else max(one for one in costs if one is not None)


def transform(out: torch.Tensor, x: torch.Tensor, dims: Sequence[int], scale: float, inverse: bool = False) -> None:
    """out = scale · the transform of x along `dims`, of what `why_not` has nothing against.

    Where x is real, `out` may have all of the last of `dims`, or half of it; where `out` is, x has half of it.
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
    """Of memory that nobody else has. The transform of real numbers begins with a real one, and has one in the middle:
    PyTorch does not look at their imaginary parts.
    """
    imaginary = torch.view_as_real(half).select(-1, 1)
    imaginary.select(-1, 0).zero_()
    if size % 2 == 0:
        imaginary.select(-1, -1).zero_()


def _along(
    out: torch.Tensor, x: torch.Tensor, dims: Sequence[int], kind: Transform, inverse: bool, scale: float = 1.0
) -> None:
    """The innermost ones are transformed: others are brought there, and results to where they belong."""
    others = sorted((one for one in range(out.dim()) if one not in dims), key=out.stride, reverse=True)
    order = [*others, *dims]
    source, target = x.permute(order).contiguous(), out.permute(order)
    in_place = target.is_contiguous() and not same_storage(target, source)
    result = target if in_place else torch.empty(target.shape, dtype=out.dtype, device=out.device)
    call = _call(x if out.is_complex() else out, dims, kind, inverse)
    call.run([result, source], written=2 if kind == Transform.HALF_TO_REAL else 1)
    if scale != 1:
        torch.mul(result, scale, out=target)
    elif not in_place:
        target.copy_(result)


def _calls(x: torch.Tensor, out: torch.Tensor, dims: Sequence[int], inverse: bool) -> list[LibraryCall]:
    """Those of `transform`."""
    if not out.is_complex():
        first = [_call(x, dims[:-1], Transform.COMPLEX, inverse)] if len(dims) > 1 else []
        return [*first, _call(out, dims[-1:], Transform.HALF_TO_REAL, inverse)]
    halves = not x.is_complex() and out.shape[dims[-1]] != x.shape[dims[-1]]
    return [_call(x, dims, Transform.REAL_TO_HALF if halves else Transform.COMPLEX, inverse)]


def _call(whole: torch.Tensor, dims: Sequence[int], kind: Transform, inverse: bool) -> LibraryCall:
    """Along `dims` of a tensor with the sizes of the side that has all elements."""

    def integers() -> dict[str, int]:
        batch = math.prod(size for dim, size in enumerate(whole.shape) if dim not in dims)
        outer, middle, inner = [1] * (MOST_DIMENSIONS - len(dims)) + [whole.shape[dim] for dim in dims]
        found = {"kind": int(kind), "inverse": int(inverse), "batch": batch}
        return found | {"outer": outer, "middle": middle, "inner": inner}

    return LibraryCall(whole.device, "fft", whole.dtype.to_real(), integers)
