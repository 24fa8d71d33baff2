"""Implements `pytest --cover N`: selects few cases per test that cover all N-way combinations of parameter values.

Also finds test ids that differ between processes, which pytest-xdist refuses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import pytest

# A set of several elements, whose order can change, or an address.
_CHANGING = re.compile(r"\{[^{}:]*,[^{}:]*\}| at 0x[0-9a-f]+>")


def changes_per_process(nodeid: str) -> bool:
    """Whether the id of a test contains the text of a set of several elements or an address."""
    return _CHANGING.search(nodeid) is not None


def chosen(cases: Sequence[Sequence[str]], together: int) -> list[int]:
    """Returns the indices of the selected cases. A case has one value for each parameter.

    Greedy: takes the case with the most new combinations; among equals, the one whose values were used least.
    """
    sets = [set(combinations(enumerate(case), min(together, len(case)))) for case in cases]
    used: Counter[tuple[int, str]] = Counter()
    had: set[tuple[tuple[int, str], ...]] = set()
    left, found = dict(enumerate(sets)), []
    while left:
        best = max(left, key=lambda at: (len(left[at] - had), -sum(used[one] for one in enumerate(cases[at]))))
        if left[best] <= had:
            break
        had |= left.pop(best)
        used.update(enumerate(cases[best]))
        found.append(best)
    return sorted(found)


def keep(items: Sequence[pytest.Item], together: int) -> list[pytest.Item]:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {cases[at] for cases in tests.values() for at in chosen([_values(case) for case in cases], together)}
    return [item for item in items if item in kept]


def _values(item: pytest.Item) -> list[str]:
    return [str(value) for value in item.callspec._idlist] if hasattr(item, "callspec") else []
