"""Properties of devices that the runtime needs before it calls a planner (csrc/aten/kernel_capabilities.h)."""

from __future__ import annotations

from collections.abc import Iterable

from torch_backplane import _C
from torch_backplane.kernels.templates.attention import attends_in_one_pass
from torch_backplane.planning import dialect_of


def declare_kernel_capabilities(indices: Iterable[int]) -> None:
    """Passes the capabilities of these devices, which run kernels, to the runtime."""
    for index in indices:
        target = dialect_of(index).target
        _C.set_kernel_capabilities(index, attends_in_one_pass=attends_in_one_pass(target), runs_threads=not target.simt)
