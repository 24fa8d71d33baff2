"""Tensors put together, narrowed and copied."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.planning import Call, copy_elements, operator


@operator("cat", dtypes="any")
def cat(call: Call, tensors: list[torch.Tensor], dim: int) -> Any:
    """A copy for each tensor. Tensors of shape (0,) may be of any rank's company and are skipped."""
    (out,) = call.outputs()
    parts = [tensor for tensor in tensors if tensor.shape != (0,)]
    position = 0
    for part in parts:
        length = part.shape[dim]
        if part.numel() > 0:
            out.narrow(dim, position, length).copy_(part)
        position += length
    return out


@operator("narrow_copy", dtypes="any")
def narrow_copy(call: Call, self: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    (out,) = call.outputs()
    if out.numel():
        out.copy_(self.narrow(dim, start, length))
    return out


@operator("backplane::copy_elements", variants=False, dtypes="any")
def copy(call: Call, source: torch.Tensor, destination: torch.Tensor, conjugate: bool, negate: bool) -> None:
    """What Tensor.copy_ comes to within a device, where it is more than one run of bytes (csrc/aten/copy.cpp)."""
    copy_elements(destination, source, conjugate, negate)
