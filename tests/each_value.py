"""What `pytest --each-value-once` runs: of each test as few cases as have every value of every parameter among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest


def chosen(cases: Sequence[Sequence[str]]) -> list[int]:
    """Which of the cases, each of them one value for each parameter; those first whose values are the newest."""
    used: Counter[tuple[int, str]] = Counter()
    found = []
    left = list(range(len(cases)))
    while left:
        worth = {at: sorted(used[value] for value in enumerate(cases[at])) for at in left}
        best = max(left, key=lambda at: (worth[at].count(0), -sum(worth[at])))
        if found and 0 not in worth[best]:
            break
        used.update(enumerate(cases[best]))
        found.append(best)
        left.remove(best)
    return sorted(found)


def keep(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {cases[at] for cases in tests.values() for at in chosen([_values(case) for case in cases])}
    return [item for item in items if item in kept]


def _values(item: pytest.Item) -> list[str]:
    return [str(value) for value in item.callspec._idlist] if hasattr(item, "callspec") else []
