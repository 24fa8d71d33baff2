"""The traffic of each kernel of a compiled graph, relative to the least that this kernel can move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_backplane.audit.driver import Launch
from torch_backplane.audit.model import SECTOR_BYTES, moved
from torch_backplane.compile_report import Report, Step
from torch_backplane.kernels.modelled import Modelled


@dataclass(frozen=True)
class FusedKernel:
    """A launch of a kernel that Inductor wrote.

    Args:
        bytes: that it moves.
        min_bytes: each element that it reads, once, and each that it writes, once.
        traffic: the first relative to the second.
    """

    kernel: str
    bytes: float
    min_bytes: int
    traffic: float


def kernels_of(report: Report) -> list[Step]:
    """Return the launches of kernels of the graphs in a report, in the order of the graphs.

    Raises:
        ValueError: something was not recorded.
    """
    if report.problems:
        raise ValueError(f"a graph was not recorded: {report.problems[0]}")
    graphs = (graph for one in report.compilations for graph in one.graphs)
    return [step for graph in graphs for step in graph.steps if step.kind == "kernel"]


def min_bytes(step: Step) -> int:
    """Return the minimum to move. The bytes of each buffer are whole sectors."""
    buffers = (*step.reads.values(), *step.writes.values())
    return sum(-(-one // SECTOR_BYTES) * SECTOR_BYTES for one in buffers)


def fused_kernels(launches: Sequence[Launch], steps: Sequence[Step], modelled: Modelled) -> list[FusedKernel]:
    """Compare launches with the steps of compiled graphs. Launches of other kernels are left out.

    A kernel can have several launches and steps, which are in the same order.

    Raises:
        ValueError: a kernel has other numbers of launches and of steps.
    """
    found = []
    for name in dict.fromkeys(one.name for one in steps):
        needed = [min_bytes(one) for one in steps if one.name == name]
        moves = [moved(one, modelled) for one in launches if one.kernel == name]
        if len(moves) != len(needed):
            raise ValueError(f"{name} was launched {len(moves)} times, and compiled graphs have {len(needed)} launches")
        pairs = zip(moves, needed, strict=True)
        found += [FusedKernel(name, bytes_, least, bytes_ / least) for bytes_, least in pairs]
    return found
