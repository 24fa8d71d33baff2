"""Matrix products by a library for the device's hardware, which its driver brings (`drivers.base.ProductLibrary`)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from torch_backplane.planning import QueueFunction, product_library

_INTEGERS = 12  # see ProductLibrary


def why_not(out: torch.Tensor) -> str | None:
    """Why the library does not compute products with this result, in words that go on with «it»; None where it does."""
    library = product_library(out.device)
    if library is None:
        return "is not there for this device"
    if out.dtype not in library.products:
        return f"({library.name}) has no {out.dtype}".replace("torch.", "")
    return None if out.dim() in (2, 3) else "takes matrices and batches of them"


def workspace(out: torch.Tensor, *operands: torch.Tensor) -> int:
    """Bytes of what has to be copied: operands, and a result, whose rows or columns are not each in one piece."""
    return sum(one.numel() * one.itemsize for one in (out, *operands) if not _has_rows(one) and not _has_rows(one.mT))


def multiply(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, beta: Any, alpha: Any
) -> None:
    """out = beta * c + alpha * a @ b, of matrices or batches of matrices, none of which is empty."""
    if out.stride(-1) != 1 and out.stride(-2) == 1:  # its columns are in one piece: outᵀ = bᵀ aᵀ
        out, a, b, c = out.mT, b.mT, a.mT, None if c is None else c.mT
    has_rows = _has_rows(out)
    result = out if has_rows else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    if c is not None:
        result.copy_(c)
    (a, a_row, a_turned), (b, b_row, b_turned) = _in_rows(a), _in_rows(b)
    batched = out.dim() == 3
    sizes = (out.shape[0] if batched else 1, *out.shape[-2:], a.shape[-1])
    steps = (one.stride(0) if batched else 0 for one in (result, a, b))
    rows = (result.stride(-2), a_row, b_row, a_turned, b_turned)
    _function(out.device, out.dtype)(result, a, b, alpha, 0 if c is None else beta, *sizes, *rows, *steps)
    if not has_rows:
        out.copy_(result)


@cache
def _function(device: torch.device, dtype: torch.dtype) -> QueueFunction:
    library = product_library(device)
    assert library is not None
    parameters = ("output", "input", "input", dtype, dtype, *[torch.int64] * _INTEGERS)
    return QueueFunction(f"{library.name}'s product", library.products[dtype], *parameters, explain=library.explain)


def _in_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """It, or a copy, from one row in memory to the next, and whether these rows are its columns."""
    if _has_rows(matrix):
        return matrix, matrix.stride(-2), 0
    if _has_rows(matrix.mT):
        return matrix, matrix.stride(-1), 1
    return matrix.contiguous(), matrix.shape[-1], 0


def _has_rows(matrix: torch.Tensor) -> bool:
    """Whether each row is in one piece, and before the next one."""
    return bool(matrix.stride(-1) == 1 and matrix.stride(-2) >= matrix.shape[-1])
