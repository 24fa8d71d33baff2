"""`torch._higher_order_ops.associative_scan` on bp devices.

PyTorch accepts a combine function of scalars (`combine_mode="pointwise"`) for CUDA and XPU tensors only. With bp
tensors, the same operator is called. It becomes a scan in a kernel (scans.py). Outside of torch.compile, PyTorch
composes it of operations on slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree


def install(module: ModuleType) -> None:
    """Let `associative_scan` accept bp tensors, in `torch._higher_order_ops.associative_scan`."""
    scan: Callable[..., Any] = module.associative_scan  # type: ignore[attr-defined]
    flat_combine: Callable[..., Any] = module.wrap_combine_fn_flat  # type: ignore[attr-defined]
    operator: Callable[..., Any] = module.associative_scan_op  # type: ignore[attr-defined]
    run: Callable[..., Any] = module._maybe_compile_and_run_fn  # type: ignore[attr-defined]

    def call(combine_fn: Callable[..., Any], leaves: list[torch.Tensor]) -> Any:
        return operator(combine_fn, leaves, additional_inputs=())

    @functools.wraps(scan)
    def associative_scan(
        combine_fn: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
    ) -> Any:
        leaves, structure = pytree.tree_flatten(xs)
        on_bp = [isinstance(one, torch.Tensor) and one.device.type == "bp" for one in leaves]
        if combine_mode != "pointwise" or not on_bp or not all(on_bp):
            return scan(combine_fn, xs, dim, reverse, combine_mode)
        _check(combine_fn, leaves, dim, reverse)
        moved = [torch.movedim(one, dim, 0) for one in leaves]
        if reverse:
            moved = [one.flip([0]) for one in moved]
        flat = functools.partial(flat_combine, combine_fn=combine_fn, spec=structure, num_leaves=len(leaves))
        found = pytree.tree_leaves(run(call, flat, moved))
        if reverse:
            found = [one.flip([0]) for one in found]
        return pytree.tree_unflatten([torch.movedim(one, 0, dim) for one in found], structure)

    module.associative_scan = associative_scan  # type: ignore[attr-defined]
    torch._higher_order_ops.associative_scan = associative_scan  # type: ignore[assignment]


def _check(combine_fn: Any, leaves: list[torch.Tensor], dim: Any, reverse: Any) -> None:
    """Raises ValueError or RuntimeError for arguments that PyTorch refuses."""
    if not callable(combine_fn):
        raise ValueError(f"Combine_fn must be a callable, but got {combine_fn}")
    if not isinstance(dim, int):
        raise ValueError(f"Dim must be an int, but got {type(dim)}")
    if not isinstance(reverse, bool):
        raise RuntimeError(f"Reverse must be a bool, but got {type(reverse)}")
    shape = leaves[0].shape
    for one in leaves:
        if one.shape != shape:
            raise ValueError(f"xs must have the same shape, but got {tuple(shape)} and {tuple(one.shape)}")
    if not -len(shape) <= dim < len(shape):
        raise IndexError(f"xs of shape {tuple(shape)} have no dimension {dim}")
    if shape[dim] == 0:
        raise ValueError(f"xs of shape {tuple(shape)} have no elements along the scan dimension {dim}")
