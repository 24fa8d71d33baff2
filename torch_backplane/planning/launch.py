"""Kernel launches: the dialect of a device, caches of generated and compiled kernels, launches, random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from torch_backplane import _C, drivers
from torch_backplane.kernels import DIALECTS, Dialect, Kernel, Target
from torch_backplane.planning import runtime
from torch_backplane.planning.lru_cache import LruCache

Made = TypeVar("Made")

MAX_KERNELS = 4096  # in each of the tables below, for all devices; then the least recently used ones are dropped

_dialects: dict[int, Dialect] = {}
_compiled: LruCache[tuple[int, str], _C.CompiledKernel] = LruCache(MAX_KERNELS, _C.is_planned)
_generated: LruCache[Hashable, Any] = LruCache(MAX_KERNELS)
_traced: LruCache[Hashable, Any] = LruCache(MAX_KERNELS)


def dialect_of(device: torch.device | int) -> Dialect:
    """Returns the dialect in which kernels for this device are written."""
    index = device if isinstance(device, int) else device.index
    if index not in _dialects:
        named = drivers.device(index).properties.dialect
        _dialects[index] = (DIALECTS[named] if isinstance(named, str) else named)(target_of(index))
    return _dialects[index]


def target_of(index: int) -> Target:
    """Returns the target of the device bp:`index`."""
    properties = drivers.device(index).properties
    target = properties.target or Target.of_kind(properties.kind)
    float64 = target.float64 and torch.float64 in properties.dtypes
    return replace(target, float64=float64, compute_units=properties.compute_units)


def generated(key: Hashable, generate: Callable[[], Made]) -> Made:
    """Returns `generate()`, a kernel and what belongs to it, cached by the key while it was used recently."""
    return _generated.get(runtime.settled(key), generate)


def traced(key: Hashable, trace: Callable[[], Made]) -> Made:
    """Returns `trace()`, a traced formula as a program or text, cached like `generated`."""
    return _traced.get(runtime.settled(key), trace)


class tracing:
    """Context manager that leaves the call to the CPU if a formula raises a TypeError, as for an unsupported dtype."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, TypeError):
            raise _C.RunOnCPU(str(error)) from error


def compiled(index: int, kernel: Kernel, name: str) -> _C.CompiledKernel:
    """Returns the kernel compiled for bp:`index`, cached by its text while a plan holds it or it was used recently.

    Args:
        index: of the device.
        kernel: the text and parameters.
        name: the operator's name, for errors.

    Raises:
        LimitExceeded: the kernel needs more arguments or local memory than the device has.
    """

    def build() -> _C.CompiledKernel:
        dialect = dialect_of(index)
        needed = dialect.argument_bytes(kernel.parameters)
        dialect.target.check(name, arguments=needed, local=kernel.local_bytes)
        parameters = [one.role if one.role in ("input", "output") else one.dtype for one in kernel.parameters]
        return _C.CompiledKernel(index, kernel.text, kernel.name, name, parameters)

    return _compiled.get((index, kernel.text), build)


def launch(
    kernel: Kernel,
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[Any],
    global_size: Sequence[int],
    group_size: Sequence[int] | None = None,
    *,
    name: str = "",
    dynamic_shared_memory: int = 0,
    cluster: Sequence[int] = (),
    cooperative: bool = False,
) -> None:
    """Launches a kernel on the current stream of the tensors' device.

    Args:
        kernel: the kernel; compiled at its first launch.
        tensors: the arguments for the "output" and "input" parameters, in order.
        numbers: the arguments for all other parameters, in order: Python numbers and `Number`s.
        global_size: work items in 1 to 3 dimensions. Rounded up to a multiple of the group size, and of the cluster
            size. Nothing is launched if it is 0 in a dimension.
        group_size: work items per group in each dimension. Default: the kernel's, else the target's, in the first
            dimension.
        name: the operator's name, for errors; the kernel's by default.
        dynamic_shared_memory: bytes per group, in addition to the local memory that the kernel declares.
        cluster: groups per cluster in each dimension.
        cooperative: whether all groups are resident at the same time, so that they can wait for each other.

    Raises:
        LimitExceeded: the kernel needs more arguments, local memory or work items per group than the device has.
        NotImplementedError: the device's driver does not support `dynamic_shared_memory`, `cluster` or `cooperative`.
    """
    index, name = tensors[0].get_device(), name or kernel.name
    target = dialect_of(index).target
    if group_size is None:
        group_size = (kernel.group_size or target.group_size, *[1] * (len(global_size) - 1))
    target.check(name, group=math.prod(group_size), local=kernel.local_bytes + dynamic_shared_memory)
    whole = [size * groups for size, groups in zip(group_size, (*cluster, 1, 1, 1), strict=False)]
    rounded = [-(-count // size) * size for count, size in zip(global_size, whole, strict=True)]
    if 0 in rounded:
        return
    built = compiled(index, kernel, name)
    runtime.launch(
        built, [*tensors, *numbers], rounded, group_size,
        dynamic_shared_memory=dynamic_shared_memory, cluster=cluster, cooperative=cooperative,
    )  # fmt: skip


def random_numbers(count: int) -> tuple[_C.Number, _C.Number]:
    """Reserves the next `count` 32-bit random numbers per element of the call's generator.

    Returns:
        (seed, offset), both int64.
    """
    return runtime.take_random(count)
