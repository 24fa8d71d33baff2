"""The runtime's services for planners.

A call goes to the runtime (csrc/plans/planner_call.cpp), or to the tracer (tracing.py) during a trace.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from torch_backplane import _C
from torch_backplane.planning import strides
from torch_backplane.planning.strides import SYMBOLS
from torch_backplane.planning.symbols import Untraceable, guarded, quantity
from torch_backplane.planning.tracing import current


def empty_strided(
    sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Calls torch.empty_strided, or during a trace directly the tracer, without PyTorch's dispatcher."""
    tracer = current()
    if tracer is None:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    return tracer.empty(sizes, strides, dtype, device)


def storage_of(tensor: torch.Tensor) -> Hashable:
    """Identifies the tensor's storage: equal for views of one storage.

    The address would not do: lazy clones share it until one of them is written.
    """
    tracer = current()
    return tensor.untyped_storage()._cdata if tracer is None else tracer.storage_of(tensor)


def same_start(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the first elements of two tensors have the same address."""
    tracer = current()
    return _C.address_of(one) == _C.address_of(other) if tracer is None else tracer.same_start(one, other)


def is_aligned(tensor: torch.Tensor, size: int) -> bool:
    """Whether the address of the tensor's first element is a multiple of `size` bytes: 1, 2, 4, 8 or 16."""
    if size not in (1, 2, 4, 8, 16):
        raise ValueError(f"size must be 1, 2, 4, 8 or 16 bytes, but got {size}")
    tracer = current()
    return _C.address_of(tensor) % size == 0 if tracer is None else tracer.is_aligned(tensor, size)


def check_overlaps(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Raises PyTorch's error if an output overlaps itself, or partially overlaps an input."""
    (current() or _C).check_overlaps(outputs, inputs)


def check_broadcast(tensors: Sequence[torch.Tensor]) -> None:
    """Raises PyTorch's error if the tensors cannot be broadcast together."""
    if current() is None:
        _C.check_broadcast(tensors)
    else:
        strides.broadcast_shapes([tensor.shape for tensor in tensors])


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """Returns the broadcast shape. Raises a RuntimeError if there is none; its message is not `check_broadcast`'s."""
    return torch.Size(strides.broadcast_shapes(shapes))


def fits(number: complex, dtype: torch.dtype) -> bool:
    """Whether PyTorch converts the number to the dtype without an overflow error."""
    if isinstance(number, torch.SymInt):
        if dtype == torch.int64 or dtype.is_floating_point:
            return True  # for any 64-bit integer, so no guard is needed
        number = guarded(number)
    return _C.fits(number, dtype)


def settled(key: Any) -> Any:
    """Replaces the symbols in a cache key with their values, and guards them: a lookup depends on the values."""
    return key if current() is None else tree_map_only(SYMBOLS, guarded, key)


def launch(
    kernel: Any,
    arguments: Sequence[Any],
    global_size: Sequence[int],
    group_size: Sequence[int],
    *,
    dynamic_shared_memory: int = 0,
    cluster: Sequence[int] = (),
    cooperative: bool = False,
) -> None:
    """Launches a compiled kernel.

    Args:
        kernel: a `_C.CompiledKernel`.
        arguments: tensors and numbers.
        global_size, group_size: work items in each dimension.
        dynamic_shared_memory: bytes per group, in addition to the local memory that the kernel declares.
        cluster: groups per cluster in each dimension; they must divide the number of groups.
        cooperative: whether all groups are resident at the same time, so that they can wait for each other.

    Raises:
        NotImplementedError: the device's driver does not support `dynamic_shared_memory`, `cluster` or `cooperative`.
    """
    attributes: dict[str, Any] = {
        "dynamic_shared_memory": int(dynamic_shared_memory),
        "cluster": [int(one) for one in cluster],
        "cooperative": cooperative,
    }
    (current() or _C).launch(kernel, arguments, global_size, group_size, **attributes)


def call_on_queue(function: Any, arguments: Sequence[Any]) -> None:
    """Calls a `_C.QueueFunction`, which enqueues work on the device's queue, with tensors and numbers."""
    (current() or _C).call_on_queue(function, arguments)


def call_library(function: Any, arguments: Sequence[Any]) -> None:
    """Calls a `_C.LibraryFunction` in a host callback, with tensors and numbers."""
    (current() or _C).call_library(function, arguments)


def call_on_cpu(name: str, values: Sequence[Any]) -> None:
    """Runs an operator's CPU kernel in a host callback, directly on the memory of bp tensors."""
    (current() or _C).call_on_cpu(name, values)


def take_random(count: int) -> tuple[_C.Number, _C.Number]:
    """Reserves `count` random numbers of the call's generator; returns its seed and the offset of the first one."""
    tracer = current()
    return _C.take_random(count) if tracer is None else tracer.builder.random(quantity(count))


def keep_in_plan(tensor: torch.Tensor) -> None:
    """Lets commands use a tensor that is neither an argument nor allocated by the planner: the plan keeps it alive."""
    (current() or _C).keep_in_plan(tensor)


def warn(text: str) -> None:
    """Issues a UserWarning, in this call and in each replay of its plan."""
    if current() is not None:
        raise Untraceable("it issues a warning")
    _C.warn(text)


def not_replayable(reason: str) -> None:
    """Marks the call as one that no plan can replay, for a reason such as "it resizes a tensor that it was given"."""
    if current() is not None:
        raise Untraceable(f"no plan can repeat it, as {reason}")
    _C.not_replayable(reason)


def check_number(number: _C.Number) -> None:
    """Checks the range of a number from `Number.fitting`, in this call and in each replay.

    For calls without elements, which launch no kernel with the number.
    """
    tracer = current()
    number.check() if tracer is None else tracer.builder.check(number)
