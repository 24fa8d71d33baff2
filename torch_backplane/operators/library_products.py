"""Matrix products by a hardware library of the device's driver (the family matmul)."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.planning import LibraryCall, allowed


def why_not(out: torch.Tensor, a: torch.Tensor | None = None, b: torch.Tensor | None = None) -> str | None:
    """Why no library computes products with this result, in words that follow «it»; None if one does."""
    if out.dim() not in (2, 3):
        return "takes matrices and batches of matrices"
    return _call(out, a, b).why_not()


def workspace(out: torch.Tensor, a: torch.Tensor | None = None, b: torch.Tensor | None = None) -> int:
    """Bytes of the routine's workspace, and of copies of operands and of a result of which neither rows nor columns are
    contiguous.
    """
    copied = [one for one in (out, a, b) if one is not None and not _has_rows(one) and not _has_rows(one.mT)]
    return sum(one.numel() * one.itemsize for one in copied) + _call(out, a, b).workspace()


def cost(out: torch.Tensor, a: torch.Tensor | None = None, b: torch.Tensor | None = None) -> int | None:
    """The routine's cost (`planning.costs`); None if the library does not state it."""
    return _call(out, a, b).cost()


def multiply(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, beta: Any, alpha: Any
) -> None:
    """out = beta * c + alpha * a @ b, for matrices or batches of matrices, none of which is empty."""
    if _has_columns(out):
        out, a, b, c = out.mT, b.mT, a.mT, None if c is None else c.mT
    has_rows = _has_rows(out)
    result = out if has_rows else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    if c is not None:
        result.copy_(c)
    a, b = (one if _has_rows(one) or _has_rows(one.mT) else one.contiguous() for one in (a, b))
    _call(result, a, b).run([result, a, b], [alpha, 0 if c is None else beta])
    if not has_rows:
        out.copy_(result)


def _call(out: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None) -> LibraryCall:
    if a is None or b is None:
        return LibraryCall(out.device, "matmul", out.dtype)
    matrices = (out.mT, b.mT, a.mT) if _has_columns(out) else (out, a, b)
    return LibraryCall(out.device, "matmul", out.dtype, lambda: _integers(*matrices))


def _integers(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> dict[str, int]:
    """The integers of the routine, for the operands or for the copies that `multiply` will make of them."""
    rows, columns = c.shape[-2:]
    found = {"batch": c.shape[0] if c.dim() == 3 else 1, "rows": rows, "columns": columns, "depth": a.shape[-1]}
    for name, one in (("c", c), ("a", a), ("b", b)):
        is_transposed = not _has_rows(one) and _has_rows(one.mT)
        is_copied = not _has_rows(one) and not is_transposed
        found[f"{name}_row"] = one.shape[-1] if is_copied else one.stride(-1 if is_transposed else -2)
        found[f"{name}_transposed"] = int(is_transposed)
        step = one.shape[-2] * one.shape[-1] if is_copied else one.stride(0)
        found[f"{name}_step"] = step if one.dim() == 3 else 0
    del found["c_transposed"]  # a result with contiguous columns is computed as its transpose
    return found | {"allowed": int(allowed("products", c.dtype))}


def _has_rows(matrix: torch.Tensor) -> bool:
    """Whether each row is contiguous and ends before the next one."""
    return bool(matrix.stride(-1) == 1 and matrix.stride(-2) >= matrix.shape[-1])


def _has_columns(matrix: torch.Tensor) -> bool:
    """Whether columns, and not rows, are contiguous. Then outᵀ = bᵀ aᵀ is a product with contiguous rows."""
    return bool(matrix.stride(-1) != 1 and matrix.stride(-2) == 1)
