"""Replays and shrinks programs with findings."""

from __future__ import annotations

import re
from collections.abc import Callable

from fuzz import comparison
from fuzz.lockstep import Lockstep, run_line
from fuzz.programs import Finding, Step, needed

Shows = Callable[[list[Step]], "Finding | None"]


def replayed(steps: list[Step], key: str, device: str, other: str) -> Finding | None:
    """Runs the program from its start and returns the finding with this key, or None."""
    run = Lockstep(device, other)
    for step in steps:
        for finding in run.run(step):
            if finding.key == key:
                return finding
    return None


def raising(steps: list[Step], device: str, other: str) -> set[int]:
    run = Lockstep(device, other)
    for step in steps:
        run.run(step)
    return run.raised


def excused(steps: list[Step], device: str, other: str) -> bool:
    """Whether, compared with float64, the device's values of the last line are as accurate as the CPU's.

    For gradients, the lines from the leaves on run in float64, because they need the graph.
    """
    run = Lockstep(device, other)
    leaves = [at for at, step in enumerate(steps[:-1]) if ".requires_grad_(" in step.line]
    is_gradient = re.search(r"autograd\.grad\(|\.grad$", steps[-1].line.strip())
    begin = leaves[0] + 1 if leaves and is_gradient else len(steps) - 1
    # Lines without operands run in their own dtype.
    for step in [*steps[:begin], *(step for step in steps[begin:] if not step.used)]:
        run.run(step)
    line = "\n".join(step.line.strip() for step in steps[begin:] if step.used)
    exact, shaken = (comparison.in_float64(run.cpu, line, shaken) for shaken in (False, True))
    code = compile(line, "<program>", "exec")
    if not exact or run_line(code, run.cpu) or run_line(code, run.bp):
        return False
    return all(
        comparison.excused(exact.get(name), value, run.bp.get(name), shaken.get(name))
        for name, value in run.cpu.items()
        if re.fullmatch(r"t\d+", name)
    )


def shrink(steps: list[Step], shows: Callable[[list[Step]], bool], budget: int = 300) -> list[Step]:
    """Removes steps while the finding still shows: first those that the last step does not depend on, then others."""
    tries = 0

    def holds(candidate: list[Step]) -> bool:
        nonlocal tries
        tries += 1
        return tries <= budget and shows(candidate)

    slice_ = _ancestors(steps)
    if len(slice_) < len(steps) and holds(slice_):
        steps = slice_
    size = max(1, len(steps) // 2)
    while size:
        at = len(steps) - 1 - size
        shorter = False
        while at > -size:
            kept = needed([*steps[: max(0, at)], *steps[at + size :]])
            if kept and kept[-1] == steps[-1] and len(kept) < len(steps) and holds(kept):
                steps, shorter = kept, True
                at = min(at, len(steps) - 1)
            at -= size
        if not (shorter and size == 1):
            size //= 2
    return steps


def _ancestors(steps: list[Step]) -> list[Step]:
    """Returns the last step and the steps that it depends on."""
    wanted = set(steps[-1].used)
    kept = [steps[-1]]
    for step in reversed(steps[:-1]):
        if step.assigned in wanted or (step.assigned is None and step.used <= wanted and "del" not in step.line):
            kept.append(step)
            wanted |= step.used
    return needed(reversed(kept))
