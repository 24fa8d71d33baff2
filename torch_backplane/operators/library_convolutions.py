"""Convolutions and their gradients by a hardware library of the device's driver (the family convolution)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from torch_backplane.kernels.templates.unfold import Windows
from torch_backplane.planning import Convolution, LibraryCall, allowed, runtime

_ALIGNMENT = 16  # bytes, of all operands
_AXES = ("depth", "height", "width")


class Described(NamedTuple):
    """A convolution whose gradients or whose values are computed.

    Args:
        kinds: what is computed.
        batch, image_channels, channels, groups: number of images, their channels, channels of the values, and groups.
        windows: the windows.
        layout: memory format of all tensors.
    """

    kinds: tuple[Convolution, ...]
    batch: int
    image_channels: int
    channels: int
    groups: int
    windows: Windows
    layout: torch.memory_format

    def integers(self, kind: Convolution, dtype: torch.dtype) -> dict[str, int]:
        """The integers of the routine. Convolutions in fewer dimensions have outer sizes of 1."""
        found = {
            "kind": int(kind),
            "channels_last": int(self.layout != torch.contiguous_format),
            "groups": self.groups,
            "batch": self.batch,
            "image_channels": self.image_channels,
            "channels": self.channels,
        }
        for name, neutral in (("image", 1), ("window", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
            numbers = getattr(self.windows, name)
            every = [neutral] * (len(_AXES) - len(numbers)) + [*numbers]
            found |= {f"{name}_{axis}": number for axis, number in zip(_AXES, every, strict=True)}
        return found | {"allowed": int(allowed("convolutions", dtype))}

    def call(self, first: torch.Tensor, kind: Convolution) -> LibraryCall:
        return LibraryCall(first.device, "convolution", first.dtype, lambda: self.integers(kind, first.dtype))


def why_not(first: torch.Tensor, described: Described | None = None) -> str | None:
    """Why no library computes convolutions of this tensor, in words that follow «it»; None if one does."""
    if described is None:
        return LibraryCall(first.device, "convolution", first.dtype).why_not()
    return next(filter(None, (described.call(first, kind).why_not() for kind in described.kinds)), None)


def workspace(first: torch.Tensor, described: Described) -> int:
    """Bytes of the routine's workspace."""
    return max((described.call(first, kind).workspace() for kind in described.kinds), default=0)


def cost(first: torch.Tensor, described: Described | None = None) -> int | None:
    """The routine's cost (`planning.costs`); None if the library does not state it."""
    if described is None or not described.kinds:
        return None
    costs = [described.call(first, kind).cost() for kind in described.kinds]
    return None if None in costs else max(one for one in costs if one is not None)


def compute(described: Described, kind: Convolution, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Computes `kind` from a and b, which `Convolution` names in this order. `out` is contiguous in the layout."""
    described.call(out, kind).run([out, *_ready((a, b), described.layout)])


def _ready(operands: Iterable[torch.Tensor], layout: torch.memory_format) -> Iterable[torch.Tensor]:
    for one in operands:
        dense = one.contiguous(memory_format=layout)
        yield dense if runtime.is_aligned(dense, _ALIGNMENT) else dense.clone(memory_format=layout)
