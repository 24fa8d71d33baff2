"""Steps of plans whose effect nobody sees, found in what `plans.explain` says of them."""

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


def plans_in(told: str) -> list[Plan]:
    """The plans that `plans.explain` tells of."""
    found = []
    for part in told.split("\n\n"):
        first, *others = part.splitlines()
        lines = [line.removeprefix("  → ") for line in others if line.startswith("  → ")]
        found.append(Plan(first.rpartition(": ")[0], lines))
    return found


def dead_steps(lines: list[str]) -> list[str]:
    """The lines of a plan that say of steps in vain: what they write is in memory of the plan's own that nobody reads
    afterwards, or that is written as a whole before; they copy memory to where it is; they allocate what no other step
    has, or nothing.

    What a kernel writes to counts as read by it, as does all that the host works on.
    """
    bytes_of = {f"allocation {found[1]}": found[2] for line in lines if (found := _ALLOCATION.match(line))}
    read: set[str] = set()  # memory of the plan's own that later steps, or the results, have
    touched: set[str] = set()  # by any of the steps that are not in vain
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
            raise ValueError(f"a step of which nothing is known: {line}")
    return dead[::-1]
