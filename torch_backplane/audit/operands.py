"""The minimum number of bytes that operators move: each operand read once, each result written once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# In-place operators that do not read what they overwrite.
_OVERWRITING = frozenset({"copy_", "fill_", "zero_"})
_UNTOUCHED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_"})


def distinct_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements. Expanded dimensions count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return min(math.prod(sizes) * tensor.itemsize, tensor.untyped_storage().nbytes()) if tensor.numel() else 0


class Operands(TorchDispatchMode):
    """Adds up the `bytes` that the ATen operators called in this mode must move, and lists their names."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        if not (func.is_view or name in _UNTOUCHED or name.startswith("_local_scalar")):
            self.bytes += sum(_moved(func, args, kwargs or {}, result))
            self.names.append(name)
        return result


def _moved(func: Any, args: Any, kwargs: Any, result: Any) -> Iterator[int]:
    name = func._schema.name.rpartition("::")[2]
    overwrites = name in _OVERWRITING or func.namespace == "backplane"  # none of these read what they write
    overwrites |= name.endswith("_") and torch.Tag.nondeterministic_seeded in func.tags
    given: set[int] = set()
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for one in tree_leaves(value):
            if not isinstance(one, torch.Tensor):
                continue
            if one.device.type == "cpu":
                continue
            given.add(id(one))
            if argument.is_write:
                yield distinct_bytes(one)
            if not (argument.is_write and (argument.is_out or overwrites)):
                yield distinct_bytes(one)
    for one in tree_leaves(result):
        if isinstance(one, torch.Tensor) and id(one) not in given:
            yield distinct_bytes(one)
