"""Tensors put together, end to end."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.planning import Call, copy_elements, operator


@operator("cat", dtypes="any")
def cat(call: Call, tensors: list[torch.Tensor], dim: int) -> Any:
    """A strided copy for each tensor. Tensors of shape (0,) may be of any rank's company and are skipped."""
    (out,) = call.outputs()
    parts = [tensor for tensor in tensors if tensor.shape != (0,)]
    position = 0
    for part in parts:
        length = part.shape[dim]
        if part.numel() > 0:
            copy_elements(out.narrow(dim, position, length), part)
        position += length
    return out
