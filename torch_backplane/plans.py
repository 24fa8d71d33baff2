"""Plans: what the runtime keeps of each planner's work, and replays without Python.

TORCH_BACKPLANE_PLANS=0 runs planners at every call; "check" replays plans and runs the planners beside them, without
effect, and raises where they would do something else.
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
    """For each operator, such as "aten::add.Tensor":

    plans: how many are held;
    replays: calls that ran by a plan of their own shape;
    dynamic_shape_replays: calls that ran by a dynamic-shape plan;
    planner_calls: calls that ran a planner;
    unplannable_calls: calls that no plan can repeat, and `reasons` why;
    evictions: plans that were dropped for newer ones;
    traces: how often a planner was asked for a dynamic-shape plan;
    classes: of calls that differ in sizes only, those that met a second shape and needed a planner for it;
    dynamic_shape_classes: those of them that have a dynamic-shape plan, and `reasons_for_exact` why others have none.

    Args:
        used: leave out operators that were not called since the last `clear()`.
    """
    counts = ("replays", "dynamic_shape_replays", "planner_calls", "unplannable_calls")
    return {name: one for name, one in _C.plan_counts().items() if not used or any(one[count] for count in counts)}


def total() -> dict[str, int]:
    """The numbers of `stats()`, summed over all operators."""
    summed = dict.fromkeys(_COUNTS, 0)
    for one in _C.plan_counts().values():
        for count in summed:
            summed[count] += one[count]
    return summed


def clear() -> None:
    """Forget all plans and set all counts to 0."""
    _C.clear_plans()


def mode() -> str:
    """How plans are used: "1", "0" or "check"."""
    return _C.plan_mode()


def set_mode(mode: str) -> None:
    """Choose how plans are used, as TORCH_BACKPLANE_PLANS does. ValueError for anything but "1", "0" and "check"."""
    _C.set_plan_mode(mode)


def explain(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Call `function(*arguments, **options)` and tell, for each operator with a planner that this thread calls: its
    arguments as the signature holds them, whether it was planned, replayed (by a plan of its own shape, or for any) or
    left to the CPU, and the plan's steps."""
    events = _C.listen_to_plans(lambda: function(*arguments, **options))
    parts = []
    for name, described, outcome, plan in events:
        lines = [f"{name}: {outcome}", *(f"  {line}" for line in described.splitlines())]
        lines += [f"  → {line}" for line in plan.splitlines()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "no operator with a planner was called"
