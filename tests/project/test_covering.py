"""Tests `pytest --cover N`: the selected cases cover all N-way combinations, and are few. Also which ids change."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from covering import changes_per_process, chosen, keep

GRIDS = {
    "none": ([], 0, 0),
    "no parameters": ([()], 1, 1),
    "one parameter": ([("a",), ("b",), ("c",)], 3, 3),
    "three parameters": (list(product("abcde", "fgh", "ij")), 5, 15),
    "four parameters": (list(product("abc", "def", "ghi", "jkl")), 3, 15),
    "a hole": ([one for one in product("abc", "abc") if one != ("b", "b")], 3, 8),
    "the same text in two places": ([("a", "b"), ("b", "a"), ("a", "a"), ("b", "b")], 2, 4),
}


@pytest.mark.parametrize("name", GRIDS)
def test_selected_cases_cover_all_combinations(name: str) -> None:
    cases, *counts = GRIDS[name]
    for together, count in enumerate(counts, start=1):
        kept = [cases[at] for at in chosen(cases, together)]
        assert len(kept) <= count
        had, wanted = ({x for one in all_ for x in combinations(enumerate(one), together)} for all_ in (kept, cases))
        assert had == wanted


@pytest.mark.parametrize(
    ("value", "changes"),
    [({1, 2}, True), ({"a": frozenset({1, 2})}, True), (object(), True), ({1}, False), ({"a": 1, "b": (1, 2)}, False)],
    ids=["a set", "a set in a dictionary", "an address", "one element", "a dictionary"],
)
def test_ids_that_differ_between_processes_are_found(value, changes):
    assert changes_per_process(f"tests/test_a.py::test_a[{value}-float32]") is changes


@pytest.mark.parametrize("last", ["x", "y"])
@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_other_tests_keep_their_cases(first: str, last: str, request: pytest.FixtureRequest) -> None:
    """Three of this test's six cases cover all values. The test above has one parameter, so all its cases are kept."""
    tests = [item for item in request.session.items if item.path == request.path]
    kept = [item.name for item in keep(tests, 1)]
    own = [name for name in kept if name.startswith("test_other_tests")]
    assert len(own) <= 3
    assert {value for name in own for value in name[:-1].partition("[")[2].split("-")} >= {first, last}
    assert kept[: -len(own)] == [item.name for item in tests if not item.name.startswith("test_other_tests")]
    assert keep(tests, 2) == tests
