"""Copies a tree of arguments or results to another device, storage by storage.

``tensor.to`` would not preserve shared storages, gaps, expanded dimensions and lazy conjugation. So each storage is
copied once, as bytes, and every tensor becomes a view of the copy. This uses few features of the device (an empty
tensor, a contiguous byte copy, ``set_``), so that a device with wrong strided copies fails in the operators under test
and not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

# For each dtype, one wide enough to distinguish rounding from errors.
WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every leaf of nested lists, tuples, dicts and slices. A path looks like ``[0]['dim']``."""
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        for index, item in enumerate(tree):
            yield from leaves(item, f"{path}[{index}]")
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(tree, slice):
        yield from leaves((tree.start, tree.stop, tree.step), path)
    else:
        yield path, tree


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree, in order."""
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def spaced(tensor: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor of the same shape with a gap after every element: all strides are doubled."""
    return torch.empty((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)[..., 0]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor of the same shape whose first dimension is innermost in memory.

    There is a gap before every run of that dimension.
    """
    *outer, inner = reversed(tensor.shape)
    return torch.empty((*outer, inner + 1), dtype=tensor.dtype, device=tensor.device)[..., 1:].permute(
        *reversed(range(tensor.dim()))
    )


# Non-contiguous layouts.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"strided": spaced, "transposed": transposed}


def noncontiguous(tree: Any, layout: Callable[[torch.Tensor], torch.Tensor] = spaced) -> Any:
    """Return the tree with the same values, and each tensor in the given layout."""
    if isinstance(tree, torch.Tensor) and tree.layout == torch.strided and tree.dim() and not tree.is_conj():
        return layout(tree).copy_(tree.detach()).requires_grad_(tree.requires_grad)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        items = [noncontiguous(item, layout) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {key: noncontiguous(item, layout) for key, item in tree.items()}
    return tree


class Transfer:
    """Copies trees to one device. Within one instance, the copies of tensors that share a storage share one, too.

    With ``wider``, floating-point and complex tensors, and dtypes, are converted to float64 and complex128, with the
    same strides. Tensors of different dtypes then do not share a storage.
    """

    def __init__(self, device: torch.device, *, wider: bool = False) -> None:
        self.device = device
        self._wider = WIDER if wider else {}
        self._storages: dict[tuple[int, torch.dtype | None], torch.UntypedStorage] = {}
        self._sources: list[torch.UntypedStorage] = []  # kept alive, so that addresses are not reused as keys

    def __call__(self, tree: Any) -> Any:
        """Return a copy of the tree on the device.

        Tensors, devices, generators and, with ``wider``, dtypes are replaced. Other leaves stay as they are.
        """
        if isinstance(tree, torch.Tensor):
            return self.tensor(tree)
        if isinstance(tree, torch.Size):
            return tree
        if isinstance(tree, (list, tuple)):
            items = [self(item) for item in tree]
            return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
        if isinstance(tree, dict):
            return {key: self(item) for key, item in tree.items()}
        if isinstance(tree, slice):
            return slice(self(tree.start), self(tree.stop), self(tree.step))
        if isinstance(tree, torch.device):
            return self.device
        if isinstance(tree, torch.dtype):
            return self._wider.get(tree, tree)
        if isinstance(tree, str) and tree == "cpu":  # in every operator, this string is a device
            return str(self.device)
        if isinstance(tree, torch.Generator):
            return torch.Generator(self.device).manual_seed(tree.initial_seed())
        return tree

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor with the same strides, conj and neg bits, and ``requires_grad``."""
        dtype = self._wider.get(tensor.dtype, tensor.dtype)
        if tensor.layout != torch.strided:
            return tensor.detach().to(self.device, dtype, copy=True)
        if tensor._is_zerotensor():  # autograd's zeros without memory
            return torch.zeros(tensor.shape, dtype=dtype, device=self.device)
        copy = torch.empty(0, dtype=dtype, device=self.device)
        copy.set_(self._storage(tensor), tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.is_conj():
            copy = torch._conj(copy)
        if tensor.is_neg():
            copy = torch._neg_view(copy)
        return copy.detach().requires_grad_(tensor.requires_grad)

    def _storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        source = tensor.untyped_storage()
        widened = tensor.dtype if tensor.dtype in self._wider else None
        key = (source._cdata, widened)
        if key not in self._storages:
            self._sources.append(source)
            content = torch.empty(0, dtype=widened or torch.uint8, device=source.device).set_(source)
            copy = torch.empty(content.shape, dtype=self._wider.get(content.dtype, torch.uint8), device=self.device)
            self._storages[key] = copy.copy_(content).untyped_storage()
        return self._storages[key]
