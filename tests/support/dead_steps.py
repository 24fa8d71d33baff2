"""Finds plan steps without effect in the output of `plans.explain`."""

from __future__ import annotations

import re
from typing import NamedTuple

_PLACE = re.compile(r"\b(argument|allocation|kept) (\d+)(?: \+ (\d+))?( \(written\))?")
_ALLOCATION = re.compile(r"allocate (\d+): (\d+) bytes")
_COPY = re.compile(r"copy (\d+) bytes from (.*) to (.*)")
_OTHERS = ("free ", "take ", "check ", "planned at each call: ", "not planned: ")


class Plan(NamedTuple):
    operator: str
    lines: list[str]  # of steps, and of what is returned


def plans_in(plan_text: str) -> list[Plan]:
    """Returns the plans in the output of `plans.explain`."""
    found = []
    for part in plan_text.split("\n\n"):
        first, *others = part.splitlines()
        lines = [line.removeprefix("  → ") for line in others if line.startswith("  → ")]
        found.append(Plan(first.rpartition(": ")[0], lines))
    return found


def dead_steps(lines: list[str]) -> list[str]:
    """Returns the lines of steps without effect.

    Such a step writes only to the plan's allocations, and no later step reads the result before it is overwritten as a
    whole; or it copies memory onto itself, copies nothing, or makes an allocation that is empty or used by no other
    step. Memory that a kernel writes, or that a host step uses, counts as read by that step.
    """
    bytes_of = {f"allocation {found[1]}": found[2] for line in lines if (found := _ALLOCATION.match(line))}
    read: set[str] = set()  # memory that later steps or the results read
    touched: set[str] = set()  # memory used by later steps that have an effect
    dead = []
    for line in reversed(lines):
        places = [(f"{kind} {index}", bool(written)) for kind, index, _, written in _PLACE.findall(line)]
        if line.startswith("return "):
            read.update(place for place, _ in places if f"in {place}" in line)
            touched |= read
        elif found := _ALLOCATION.match(line):
            if f"allocation {found[1]}" not in touched or found[2] == "0":
                dead.append(line)
        elif line.startswith(("launch ", "call ", "on the host ", "copy ")):
            copied = _COPY.match(line)
            if copied:
                written = [places[1][0]]
            else:
                written = [place for place, is_written in places if is_written or line.startswith("on the host ")]
            is_seen = any(not place.startswith("allocation") or place in read for place in written)
            if not is_seen or (copied and (copied[1] == "0" or copied[2] == copied[3])):
                dead.append(line)
                continue
            if copied and written[0] == copied[3] and bytes_of.get(written[0]) == copied[1]:
                read.discard(written[0])  # as a whole
                places = places[:1]
                touched.add(written[0])
            read.update(place for place, _ in places)
            touched.update(place for place, _ in places)
        elif not line.startswith(_OTHERS):
            raise ValueError(f"unknown step: {line}")
    return dead[::-1]
