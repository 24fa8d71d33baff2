"""`pytest --each-value-once`: every value of every parameter is in a case that runs, and few cases run."""

from __future__ import annotations

from itertools import product

import pytest
from each_value import chosen, keep

GRIDS = {
    "none": ([], 0),
    "no parameters": ([()], 1),
    "one parameter": ([("a",), ("b",), ("c",)], 3),
    "three parameters": (list(product("abcde", "fgh", "ij")), 5),
    "a hole": ([one for one in product("abc", "abc") if one != ("b", "b")], 3),
    "the same text in two places": ([("a", "b"), ("b", "a"), ("a", "a"), ("b", "b")], 2),
}


@pytest.mark.parametrize("name", GRIDS)
def test_few_cases_have_every_value(name: str) -> None:
    cases, count = GRIDS[name]
    found = chosen(cases)
    assert len(found) == count
    assert {value for at in found for value in enumerate(cases[at])} == {v for one in cases for v in enumerate(one)}


@pytest.mark.parametrize("last", ["x", "y"])
@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_other_tests_keep_their_cases(first: str, last: str, request: pytest.FixtureRequest) -> None:
    """Of this test's six cases three are kept; of the one above, which has one parameter, every one."""
    tests = [item for item in request.session.items if item.path == request.path]
    kept = [item.name for item in keep(tests)]
    own = [name for name in kept if name.startswith("test_other_tests")]
    assert len(own) <= 3
    assert {value for name in own for value in name[:-1].partition("[")[2].split("-")} >= {first, last}
    assert kept[: -len(own)] == [item.name for item in tests if not item.name.startswith("test_other_tests")]
