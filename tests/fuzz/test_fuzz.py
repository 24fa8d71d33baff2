"""Runs a fixed set of random programs. `make fuzz` runs new ones."""

from __future__ import annotations

import on_opencl
import pytest

from fuzz.campaign import Campaign
from fuzz.known import is_open

FIRST = 1
PROGRAMS = {"host": 60, "opencl": 8}  # less than half a minute, including kernel builds


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["host", "opencl", "opencl, discrete"])
def test_random_programs_match_the_cpu(
    kind: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    driver = kind.partition(",")[0]
    if driver == "opencl":
        on_opencl.require_platform()
    monkeypatch.setenv("TORCH_BACKPLANE_DISCRETE", "1" if "discrete" in kind else "0")
    first = FIRST + 100_000 * pytestconfig.getoption("--seed")
    report = Campaign(driver, first, 800, PROGRAMS[driver]).run()
    found = [*report.findings.values(), *report.unrepeated]
    new = [
        item["program"]
        for item in found
        if not is_open(item["finding"], item["message"], [step["line"] for step in item["steps"]], driver)
    ]
    assert not new, "\n\n".join(new)
    assert report.programs == PROGRAMS[driver]
    assert report.steps > 40 * report.programs
