"""What planners ask of the runtime (csrc/plans/planner_call.cpp), or of the trace, while there is one (tracing.py)."""

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
    """As torch.empty_strided, which a trace would reach through PyTorch's dispatcher."""
    tracer = current()
    if tracer is None:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    return tracer.empty(sizes, strides, dtype, device)


def storage_of(tensor: torch.Tensor) -> Hashable:
    """Equal for views of one storage. Not by addresses, which lazy clones share, too, until one is written."""
    tracer = current()
    return tensor.untyped_storage()._cdata if tracer is None else tracer.storage_of(tensor)


def same_start(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether their first elements are in one place."""
    tracer = current()
    return _C.address_of(one) == _C.address_of(other) if tracer is None else tracer.same_start(one, other)


def is_aligned(tensor: torch.Tensor, size: int) -> bool:
    """Whether the address of its first element is a multiple of `size`: of bytes, and 1, 2, 4, 8 or 16."""
    if size not in (1, 2, 4, 8, 16):
        raise ValueError(f"alignment is known to 1, 2, 4, 8 or 16 bytes, and asked for {size}")
    tracer = current()
    return _C.address_of(tensor) % size == 0 if tracer is None else tracer.is_aligned(tensor, size)


def check_overlaps(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Raises PyTorch's error where memory is both read and written elsewhere."""
    (current() or _C).check_overlaps(outputs, inputs)


def check_broadcast(tensors: Sequence[torch.Tensor]) -> None:
    """Raises PyTorch's error where the tensors do not broadcast to one shape."""
    if current() is None:
        _C.check_broadcast(tensors)
    else:
        strides.broadcast_shapes([tensor.shape for tensor in tensors])


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """The shape that they broadcast to. RuntimeError where they do not, in other words than `check_broadcast`'s."""
    return torch.Size(strides.broadcast_shapes(shapes))


def fits(number: complex, dtype: torch.dtype) -> bool:
    """Whether PyTorch takes the number for one of this dtype."""
    if isinstance(number, torch.SymInt):
        if dtype == torch.int64 or dtype.is_floating_point:
            return True  # as any number of 64 bits
        number = guarded(number)
    return _C.fits(number, dtype)


def settled(key: Any) -> Any:
    """The same without symbols, for caches: what is looked up by a number has looked at it."""
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
    """Runs a compiled kernel on tensors and numbers; both sizes are work items in each dimension.

    Args:
        dynamic_shared_memory: bytes for each group, in addition to what the kernel declares.
        cluster: groups per cluster in each dimension; they divide the number of groups.
        cooperative: all groups are resident at the same time, so that they may wait for each other.

    Raises:
        NotImplementedError: the device's driver offers no launches with attributes.
    """
    attributes: dict[str, Any] = {
        "dynamic_shared_memory": int(dynamic_shared_memory),
        "cluster": [int(one) for one in cluster],
        "cooperative": cooperative,
    }
    (current() or _C).launch(kernel, arguments, global_size, group_size, **attributes)


def call_on_queue(function: Any, arguments: Sequence[Any]) -> None:
    """Has a function of a library give work to the device's queue, with tensors and numbers."""
    (current() or _C).call_on_queue(function, arguments)


def call_library(function: Any, arguments: Sequence[Any]) -> None:
    """Runs a function of a library on tensors and numbers."""
    (current() or _C).call_library(function, arguments)


def call_on_cpu(name: str, values: Sequence[Any]) -> None:
    """Runs an operator's kernel for the CPU on the memory of bp tensors, which the host sees."""
    (current() or _C).call_on_cpu(name, values)


def take_random(count: int) -> tuple[_C.Number, _C.Number]:
    """Seed and offset of the next `count` random numbers of the call's generator."""
    tracer = current()
    return _C.take_random(count) if tracer is None else tracer.builder.random(quantity(count))


def keep_in_plan(tensor: torch.Tensor) -> None:
    """Lets the plan refer to memory that is neither an argument nor made by the planner, and holds it."""
    (current() or _C).keep_in_plan(tensor)


def warn(text: str) -> None:
    """Gives a UserWarning, in this call and in each replay of its plan."""
    if current() is not None:
        raise Untraceable("a call without a warning")
    _C.warn(text)


def not_replayable(reason: str) -> None:
    """Says that the planner does what no plan can repeat."""
    if current() is not None:
        raise Untraceable(f"no plan, as {reason}")
    _C.not_replayable(reason)


def check_number(number: _C.Number) -> None:
    """Checks one that is `fitting` and not passed on, where there are no elements to compute, in each call."""
    tracer = current()
    number.check() if tracer is None else tracer.builder.check(number)
