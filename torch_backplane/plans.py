"""Plans: the commands of planner calls, which the runtime records, and replays for later calls without Python.

TORCH_BACKPLANE_PLANS selects the mode: "1" replays plans, "0" runs the planner at every call. "check" replays plans,
also runs the planners without executing their commands, and raises an error if the two differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_backplane import _C

_COUNTS = (
    "plans", "replays", "dynamic_shape_replays", "planner_calls", "unplannable_calls", "evictions", "traces", "classes",
    "dynamic_shape_classes",
)  # fmt: skip


def stats(*, used: bool = True) -> dict[str, dict[str, Any]]:
    """Return statistics about plans for each operator.

    Args:
        used: whether to omit operators that were not called since the last `clear()`.

    Returns:
        A dict for each operator, by its full name, such as "aten::add.Tensor". A class is a set of calls that differ
        only in sizes. The keys are:

        - plans: plans in the cache.
        - replays: calls that replayed a plan for their own shape.
        - dynamic_shape_replays: calls that replayed a dynamic-shape plan.
        - planner_calls: calls that ran a planner.
        - unplannable_calls: calls that no plan can repeat.
        - reasons: a list of reasons for these.
        - evictions: plans that were dropped for newer ones.
        - traces: traces of the planner for a dynamic-shape plan.
        - classes: classes with calls of a second shape that ran a planner.
        - dynamic_shape_classes: those of them that have a dynamic-shape plan.
        - reasons_for_exact: a list of reasons why the others have none.
    """
    counts = ("replays", "dynamic_shape_replays", "planner_calls", "unplannable_calls")
    return {name: one for name, one in _C.plan_counts().items() if not used or any(one[count] for count in counts)}


def total() -> dict[str, int]:
    """Return the numbers of `stats()`, summed over all operators."""
    summed = dict.fromkeys(_COUNTS, 0)
    for one in _C.plan_counts().values():
        for count in summed:
            summed[count] += one[count]
    return summed


def clear() -> None:
    """Drop all plans and reset all statistics."""
    _C.clear_plans()


def mode() -> str:
    """Return the mode of plans: "1", "0" or "check"."""
    return _C.plan_mode()


def set_mode(mode: str) -> None:
    """Set the mode of plans, as the environment variable TORCH_BACKPLANE_PLANS does.

    Args:
        mode: "1" to replay plans, "0" to run the planner at every call, "check" to do both and compare them.

    Raises:
        ValueError: `mode` is none of these.
    """
    _C.set_plan_mode(mode)


def explain(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Call `function(*arguments, **options)` and describe the calls of operators with planners in this thread.

    Args:
        function: the function to call.
        *arguments: its positional arguments.
        **options: its keyword arguments.

    Returns:
        For each call: the operator; whether it was planned, replayed (by a plan for its own shape or a dynamic-shape
        plan) or left to the CPU; its arguments as in the signature; and the steps of the plan.
    """
    events = _C.listen_to_plans(lambda: function(*arguments, **options))
    parts = []
    for name, described, outcome, plan in events:
        lines = [f"{name}: {outcome}", *(f"  {line}" for line in described.splitlines())]
        lines += [f"  → {line}" for line in plan.splitlines()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "no operator with a planner was called"
