"""Concatenation, narrowing and copying of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.planning import Call, as_bits, copy_elements, dialect_of, operator, run_pointwise

_MAX_TOGETHER = 8  # most tensors that one launch reads


@operator("cat", dtypes="any")
def cat(call: Call, tensors: list[torch.Tensor], dim: int) -> Any:
    """Copies each tensor. Skips tensors of shape (0,), which PyTorch accepts together with tensors of any rank."""
    (out,) = call.outputs()
    parts = [tensor for tensor in tensors if tensor.shape != (0,)]
    if _alternate(out, parts, dim):
        bits = [as_bits(part) for part in parts]
        run_pointwise(lambda *of: _one_of(of, dim), [as_bits(out)], bits, key=("cat", dim), name="cat")
        return out
    position = 0
    for part in parts:
        length = part.shape[dim]
        if part.numel() > 0:
            out.narrow(dim, position, length).copy_(part)
        position += length
    return out


def _alternate(out: torch.Tensor, parts: list[torch.Tensor], dim: int) -> bool:
    """Whether adjacent elements of `out` come from different tensors and one launch can write all of them. A launch for
    each tensor would go through all of `out`'s memory.
    """
    target = dialect_of(out.device).target
    if not target.simt or not 2 <= len(parts) <= _MAX_TOGETHER or out.itemsize > 8 or out.numel() == 0:
        return False
    operands = len(parts) + 2  # with the result and positions
    if operands * (16 + 8 * out.dim()) + 16 > target.max_argument_bytes:
        return False
    return out.stride(dim) == 1 and all(
        part.shape[dim] == 1 and part.dtype == out.dtype and not part.is_conj() and not part.is_neg() for part in parts
    )


def _one_of(values: Sequence[Any], dim: int) -> Any:
    """The value whose number is the position along `dim`."""
    *others, found = values
    for number in reversed(range(len(others))):
        found = f.where(f.index(dim) == number, others[number], found)
    return found


@operator("narrow_copy", dtypes="any")
def narrow_copy(call: Call, self: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    (out,) = call.outputs()
    if out.numel():
        out.copy_(self.narrow(dim, start, length))
    return out


@operator("backplane::copy_elements", variants=False, dtypes="any")
def copy(call: Call, source: torch.Tensor, destination: torch.Tensor, conjugate: bool, negate: bool) -> None:
    """Implements Tensor.copy_ within a device, unless one copy of bytes suffices (csrc/aten/copy.cpp)."""
    copy_elements(destination, source, conjugate, negate)
