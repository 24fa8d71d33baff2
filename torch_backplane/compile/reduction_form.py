"""How a kernel of a compiled graph divides its reductions among work items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from torch_backplane.compile.sorts import Order, key_dtype
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.target import Target
from torch_backplane.kernels.templates.source import rows_and_columns
from torch_backplane.planning.launch import dialect_of

# Work items of a group that reduce alone, on targets where a group is a thread.
ITEMS_OF_THREAD = 4
# Reductions of fewer elements run by threads.
_SHORT = 16
# With at least this many results, reductions along columns run by threads.
_MANY = 1024
# Partial states, or adjacent results, of a work item on targets where it fills vector registers itself.
_LANES = 16
# Elements of a result that a work item keeps from one loop to the next: in registers, and on CPUs in its cache.
_KEPT_ON_GPU = 16
_KEPT_ON_CPU = 4096
_LARGEST_TEAM = 256
# Kernels of graphs sort up to this many elements.
LONGEST_SORT = 256
# The local memory of a work item for a sort: a key, an element, and its position (int16).
_SORTED_BYTES = 8 + 8 + 2


class ReductionForm(NamedTuple):
    """How a kernel divides its reductions among work items.

    Args:
        team: work items that share a result; 1 if a work item computes results alone.
        teams: teams of a group. More than one only for sorts, which can be of few elements.
        lanes: partial states that a work item keeps of a result.
        tile: adjacent results that a work item computes.
        kept: elements of a result that a work item has, if it keeps their values for later loops (elements.py); else 0.
    """

    team: int = 1
    teams: int = 1
    lanes: int = 1
    tile: int = 1
    kept: int = 0


def choose_form(features: Any, target: Target, dimensions: int) -> ReductionForm:
    """Chooses the form for an Inductor kernel's features.

    Args:
        dimensions: the number of dimensions of the iteration space that are not reduced.
    """
    if not features.is_reduction():
        return ReductionForm()
    scans = _scans(features.reduction_nodes())
    if any(isinstance(one.combine_fn, Order) for one in scans):
        elements = features.reduction_numel
        return ReductionForm(team=sorting_team(target, elements), teams=_teams(target, elements))
    hint = V.graph.sizevars.optimization_hint
    results, length = (hint(one, fallback=_MANY) for one in (features.numel, features.reduction_numel))
    along_columns = _reads_along_results(features)
    if target.simt:
        team = _team(target, results, length, along_columns)
        while team > 1 and team * _local_bytes(scans) > target.local_memory // 2:
            team //= 2
        return ReductionForm(team=team, kept=_kept(features, team, _KEPT_ON_GPU))
    if along_columns:
        return ReductionForm(tile=_LANES if dimensions == 1 and results >= _LANES else 1)
    return ReductionForm(lanes=_LANES if length >= 4 * _LANES else 1, kept=_kept(features, 1, _KEPT_ON_CPU))


def longest_kept(target: Target) -> int:
    """The number of elements of the longest row that a team keeps, on targets where work items run in lockstep."""
    return target.group(_LARGEST_TEAM) * _KEPT_ON_GPU


def _kept(features: Any, team: int, most: int) -> int:
    """How many elements of a result a work item has; 0 if they are more than `most`, or their number is not fixed."""
    length = features.reduction_numel
    if features.contains_op("scan") or not isinstance(length, (int, sympy.Integer)) or length > most * team:
        return 0
    return -(-int(length) // team)


def _team(target: Target, results: int, length: int, along_columns: bool) -> int:
    """The work items that share a result."""
    if target.team_size == 1 or length < _SHORT or (along_columns and results >= _MANY):
        return 1
    team = target.team_size
    while team < _LARGEST_TEAM and team * _KEPT_ON_GPU < length:
        team *= 2
    team = target.group(team)
    while team > 1 and team // 2 >= length:
        team //= 2
    return team


def sorting_team(target: Target, length: Any) -> int:
    """The work items that sort `length` elements together, at least as many; 1 if kernels of graphs do not sort them.

    Args:
        length: an integer, or an expression of sizes. If it has no known bound, kernels of graphs do not sort.
    """
    if target.team_size == 1 or not V.graph.sizevars.statically_known_leq(length, LONGEST_SORT):
        return 1
    team = 4  # PoCL fails to compile work groups of two
    while not V.graph.sizevars.statically_known_leq(length, team):
        team *= 2
    return team if team <= target.max_group_size and team * _SORTED_BYTES <= target.local_memory // 2 else 1


def _teams(target: Target, length: Any) -> int:
    """The teams of a group that sort `length` elements each: enough to leave few lanes of the hardware idle."""
    return max(1, target.team_size // sorting_team(target, length))


def is_sorted_in_kernel(device: torch.device, length: Any) -> bool:
    """Whether kernels of graphs sort `length` elements, an integer or an expression of sizes, on the device."""
    return device.type == "bp" and sorting_team(dialect_of(device).target, length) > 1


def fits_local_memory(target: Target, nodes: Iterable[Any]) -> bool:
    """Whether one kernel can have the scans and sorts of these scheduler nodes. A sort determines the size of teams."""
    scans = _scans(nodes)
    lengths = [one.scan_ranges[0] for one in scans if isinstance(one.combine_fn, Order)]
    items = max((sorting_team(target, one) * _teams(target, one) for one in lengths), default=0)
    return items * _local_bytes(scans) <= target.local_memory // 2


def _scans(nodes: Iterable[Any]) -> list[Any]:
    return [one.node.data for one in nodes if isinstance(getattr(one.node, "data", None), ir.Scan)]


def _local_bytes(scans: Iterable[Any]) -> int:
    """The local memory of a work item for scans, which keep two copies of their states (scans.py), and for sorts."""
    arrays: dict[Any, int] = {}
    for scan in scans:
        is_sort = isinstance(scan.combine_fn, Order)
        dtypes = [value_dtype(one) for one in scan.dtypes]
        arrays |= {(is_sort, k, one): (1 if is_sort else 2) * one.itemsize for k, one in enumerate(dtypes)}
        if is_sort:
            arrays["keys", key_dtype(dtypes[0])] = key_dtype(dtypes[0]).itemsize
    return sum(arrays.values())


def should_divide_scan(target: Target, size: Sequence[Any], dim: int) -> bool:
    """Whether work items should scan chunks of a line: a few lines of very many elements.

    A kernel of a graph scans whole lines. The kernels of eager PyTorch divide them (kernels/templates/scan.py).

    Args:
        size: the size of the tensor; integers or expressions of sizes.
    """
    hints = [V.graph.sizevars.optimization_hint(one, fallback=_MANY) for one in size]
    rows, length, columns = rows_and_columns(hints, dim)
    lines = rows * columns
    team = _team(target, lines, length, columns > 1)
    groups = lines if team > 1 else -(-lines // target.small_group(ITEMS_OF_THREAD))
    return target.should_divide(groups, -(-length // team))


def _reads_along_results(features: Any) -> bool:
    """Whether elements of adjacent results, and not adjacent elements of a result, are adjacent in memory."""
    rows = columns = 0
    for node in features.reduction_nodes():
        kept, reduced = node._body.vars
        for index in node._body.get_read_exprs():
            strides = V.graph.sizevars.stride_hints(index, [*kept, *reduced])
            along_results, along_reduced = strides[: len(kept)], strides[len(kept) :]
            rows += 1 in along_reduced
            columns += any(along_reduced) and 1 not in along_reduced and 1 in along_results
    return columns > rows
