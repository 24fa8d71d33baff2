"""Rearrangement of elements: roll, flip, channel_shuffle, pixel_shuffle and pixel_unshuffle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from torch_backplane.kernels.templates.source import named, split
from torch_backplane.planning import Call, Refused, as_bits, contiguous_result, operator, run_kernel


@operator("roll", dtypes="any")
def roll(call: Call, self: torch.Tensor, shifts: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    """Copies each block that stays together. Each rolled dimension has two of them."""
    if len(shifts) != (len(dims) or 1):
        raise Refused("shifts and dims have different lengths")
    if self.numel() == 0:
        return torch.empty_like(self)  # PyTorch's meta kernel divides by the size
    (out,) = call.outputs()
    if not dims:
        with contiguous_result(out) as result:
            _roll(result.view(-1), self.reshape(-1), {0: shifts[0]})
        return out
    by_dim: dict[int, int] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        by_dim[dim % self.dim()] = by_dim.get(dim % self.dim(), 0) + shift
    _roll(out, self, by_dim)
    return out


def _roll(out: torch.Tensor, self: torch.Tensor, shifts: dict[int, int]) -> None:
    for choice in itertools.product(*(_parts(dim, self.shape[dim], shift) for dim, shift in shifts.items())):
        to, source = out, self
        for dim, start, length, origin in choice:
            to, source = to.narrow(dim, start, length), source.narrow(dim, origin, length)
        if to.numel():
            to.copy_(source)


def _parts(dim: int, size: int, shift: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (dim, destination, length, source) of the two parts of a dimension."""
    shift %= size
    yield dim, shift, size - shift, 0
    yield dim, 0, shift, size - shift


@operator("flip", dtypes="any")
def flip(call: Call, self: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Reads with negative strides, which kernels support although tensors do not."""
    (out,) = call.outputs()
    if self.numel() == 0:
        return out
    self = self if self.dim() else self.view(1)
    flipped = {dim % self.dim() for dim in dims}
    with contiguous_result(out) as result:
        source = as_bits(self)
        rank = source.dim()
        start = sum((source.shape[dim] - 1) * source.stride(dim) for dim in flipped)
        steps = [-step if dim in flipped else step for dim, step in enumerate(source.stride())]
        at = " + ".join(f"c{dim} * step{dim}" for dim in range(rank))
        places = split("item", [f"size{dim}" for dim in range(rank)], [f"c{dim}" for dim in range(rank)])
        run_kernel(
            "flip",
            f"{places} store_out(item, load_self(start + {at}));",
            items=source.numel(),
            outputs={"out": as_bits(result)},
            inputs={"self": source},
            integers={"start": start, **named("size", source.shape), **named("step", steps)},
            value=source.dtype,
            strided={"self"},
        )
    return out


@operator("channel_shuffle", dtypes="any")
def channel_shuffle(call: Call, self: torch.Tensor, groups: int) -> torch.Tensor:
    """Interleaves the channels (dimension 1) of groups: a copy with transposed dimensions."""
    (out,) = call.outputs(contiguous=True)
    if self.numel():
        shuffled = self.unflatten(1, (groups, -1)).transpose(1, 2)
        out.unflatten(1, (-1, groups)).copy_(shuffled)
    return out


@operator("pixel_shuffle", dtypes="any")
def pixel_shuffle(call: Call, self: torch.Tensor, upscale_factor: int) -> torch.Tensor:
    """(…, channels * r * r, height, width) to (…, channels, height * r, width * r)."""
    if self.dim() < 3 or upscale_factor < 1 or self.shape[-3] % upscale_factor**2:
        raise Refused("upscale_factor squared does not divide the channels")
    (out,) = call.outputs()
    if out.numel():
        r = (upscale_factor, upscale_factor)
        source = self.unflatten(-3, (-1, *r))  # channels, r, r, height, width
        to = out.unflatten(-1, (-1, r[1])).unflatten(-3, (-1, r[0]))  # channels, height, r, width, r
        to.movedim((-3, -1), (-4, -3)).copy_(source)
    return out


@operator("pixel_unshuffle", dtypes="any")
def pixel_unshuffle(call: Call, self: torch.Tensor, downscale_factor: int) -> torch.Tensor:
    """(…, channels, height * r, width * r) to (…, channels * r * r, height, width)."""
    if self.dim() < 3 or downscale_factor < 1 or any(size % downscale_factor for size in self.shape[-2:]):
        raise Refused("downscale_factor does not divide height and width")
    (out,) = call.outputs()
    if out.numel():
        r = (downscale_factor, downscale_factor)
        source = self.unflatten(-1, (-1, r[1])).unflatten(-3, (-1, r[0]))
        out.unflatten(-3, (-1, *r)).copy_(source.movedim((-3, -1), (-4, -3)))
    return out
