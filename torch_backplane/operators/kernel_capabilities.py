"""What the runtime has to know of devices before a planner is asked (csrc/aten/kernel_capabilities.h)."""

from __future__ import annotations

from collections.abc import Iterable

from torch_backplane import _C
from torch_backplane.kernels.templates.attention import attends_in_one_pass
from torch_backplane.planning import dialect_of


def declare_kernel_capabilities(indices: Iterable[int]) -> None:
    """Tells it of these devices, which run kernels, by their targets."""
    for index in indices:
        target = dialect_of(index).target
        _C.set_kernel_capabilities(index, attends_in_one_pass=attends_in_one_pass(target), runs_threads=not target.simt)
