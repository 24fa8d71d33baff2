"""Programs end as they should, whatever is under way: a sample of what `make test-exit` runs hundreds of times."""

from __future__ import annotations

from collections.abc import Iterator

import exit_ways
import pytest
from test_opencl import platform  # noqa: F401  # a fixture


@pytest.fixture(scope="module", params=exit_ways.DRIVERS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[exit_ways.Runner]:
    if request.param == "opencl":
        request.getfixturevalue("platform")
    made = exit_ways.Runner(request.param, tmp_path_factory.mktemp("exit"))
    yield made
    made.close()


@pytest.mark.parametrize("way", exit_ways.WAYS)
def test_a_program_ends_as_it_should(runner: exit_ways.Runner, way: str) -> None:
    times = 8 if way == "end of script, at once" else 1  # the others differ from each other in a few of a hundred runs
    assert [runner.run(exit_ways.WAYS[way]) for _ in range(times)] == ["good"] * times
