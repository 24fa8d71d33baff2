"""How a kernel of a compiled graph divides its reductions among work items."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch._inductor.virtualized import V

from torch_backplane.kernels.target import Target

# Reductions of fewer elements run by threads.
_SHORT = 16
# With at least this many results, reductions along columns run by threads.
_MANY = 1024
# Partial states, or adjacent results, of a work item on targets where it fills vector registers itself.
_LANES = 16


class ReductionForm(NamedTuple):
    """How a kernel divides its reductions among work items.

    Args:
        team: work items that share a result; 1 if a work item computes results alone.
        lanes: partial states that a work item keeps of a result.
        tile: adjacent results that a work item computes.
    """

    team: int = 1
    lanes: int = 1
    tile: int = 1


def choose_form(features: Any, target: Target, dimensions: int) -> ReductionForm:
    """Chooses the form for an Inductor kernel's features.

    Args:
        dimensions: the number of dimensions of the iteration space that are not reduced.
    """
    if not features.is_reduction():
        return ReductionForm()
    hint = V.graph.sizevars.optimization_hint
    results, length = (hint(one, fallback=_MANY) for one in (features.numel, features.reduction_numel))
    along_columns = _reads_along_results(features)
    if target.simt:
        if target.team_size == 1 or length < _SHORT or (along_columns and results >= _MANY):
            return ReductionForm()
        team = target.group(256 if length >= 2048 else target.team_size)
        while team > 1 and team // 2 >= length:
            team //= 2
        return ReductionForm(team=team)
    if along_columns:
        return ReductionForm(tile=_LANES if dimensions == 1 and results >= _LANES else 1)
    return ReductionForm(lanes=_LANES if length >= 4 * _LANES else 1)


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
