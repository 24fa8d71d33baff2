"""Plans contain no dead steps, whose effects are not observable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from agreement import DEVICE, plans_from_the_start
from dead_steps import dead_steps, plans_in
from planned_calls import CALLS, Make

from torch_backplane import plans
from torch_backplane.planning.declare import find


def found_in(function: Callable[[], object]) -> list[str]:
    """The dead steps in the plans of a call."""
    with plans_from_the_start():
        plan_text = plans_in(plans.explain(function))
    return [f"{plan.operator}: {line}, in {plan.lines}" for plan in plan_text for line in dead_steps(plan.lines)]


def called(name: str, make: Make) -> Callable[[], object]:
    overload, given = find(name), make(DEVICE)
    declared = list(zip(overload._schema.arguments, given, strict=False))
    named = {argument.name: value for argument, value in declared if argument.kwarg_only}
    return lambda: overload(*(value for argument, value in declared if not argument.kwarg_only), **named)


@pytest.mark.parametrize("part", range(4))
def test_planned_calls_have_no_dead_steps(part: int) -> None:
    found = []
    for name in list(CALLS)[part::4]:
        for make in (CALLS[name].make, *CALLS[name].also):
            found += found_in(called(name, make))
    assert not found, "\n".join(found)
