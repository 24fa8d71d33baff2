"""From kernel text to the device: dialects, compiled kernels, launches and random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from torch_backplane import _C, drivers
from torch_backplane.kernels import DIALECTS, Dialect, Kernel, Target
from torch_backplane.planning import runtime
from torch_backplane.planning.recent import Recent

Made = TypeVar("Made")

MOST_KERNELS = 4096  # of all devices, built ones and texts: beyond that, those that were used the longest time ago go

_dialects: dict[int, Dialect] = {}
_compiled: Recent[tuple[int, str], _C.CompiledKernel] = Recent(MOST_KERNELS, _C.is_planned)
_generated: Recent[Hashable, Any] = Recent(MOST_KERNELS)
_traced: Recent[Hashable, Any] = Recent(MOST_KERNELS)


def dialect_of(device: torch.device | int) -> Dialect:
    """How kernel text for this device is spelled."""
    index = device if isinstance(device, int) else device.index
    if index not in _dialects:
        named = drivers.device(index).properties.dialect
        _dialects[index] = (DIALECTS[named] if isinstance(named, str) else named)(target_of(index))
    return _dialects[index]


def target_of(index: int) -> Target:
    """What bp:`index` is."""
    properties = drivers.device(index).properties
    target = properties.target or Target.of_kind(properties.kind)
    float64 = target.float64 and torch.float64 in properties.dtypes
    return replace(target, float64=float64, compute_units=properties.compute_units)


def generated(key: Hashable, generate: Callable[[], Made]) -> Made:
    """The kernel, and what belongs to it, that `generate()` makes: once for each key, as long as it is among those that
    were used last.
    """
    return _generated.get(runtime.settled(key), generate)


def traced(key: Hashable, trace: Callable[[], Made]) -> Made:
    """The same of traced formulas, as programs or text."""
    return _traced.get(runtime.settled(key), trace)


class tracing:
    """Leaves to the CPU what a formula does not take: it computes that, or says in PyTorch's words that it does not."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, TypeError):
            raise _C.RunOnCPU(str(error)) from error


def compiled(index: int, kernel: Kernel, name: str) -> _C.CompiledKernel:
    """The kernel built for bp:`index`, once for each text, as long as a plan has it or it is among those that were used
    last. `name` is the operator's, for errors. LimitExceeded where it needs more than the device has.
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
    """Runs `kernel` on the current stream of the tensors' device.

    Args:
        tensors: for the "output" and "input" parameters, in their order.
        numbers: for all other parameters, in their order: Python numbers and `Number`s.
        global_size: work items in 1 to 3 dimensions, rounded up to whole groups, and to whole clusters.
        group_size: work items of a group in each dimension; without it the kernel's own, or as many as the target says.
        name: of the operator, for errors.
        dynamic_shared_memory, cluster, cooperative: as of `runtime.launch`.

    Raises:
        LimitExceeded: the kernel needs more arguments, local memory or work items in a group than the device takes.
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
    """(seed, offset) of the next `count` 32-bit random numbers per element of the call's generator; both int64."""
    return runtime.take_random(count)
