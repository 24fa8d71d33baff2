"""Which of PyTorch's databases run, and what is expected to fail (`expected_failures.py`).

An expected failure that passes fails the run: its line goes.
"""

from __future__ import annotations

import zlib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from expected_failures import EXPECTED

HERE = Path(__file__).parent
PART = 40  # one test in so many runs without --whole


def _expected(on: str) -> dict[str, str]:
    """Reasons by patterns of the names of tests, on such devices."""
    return {**EXPECTED["all"], **EXPECTED["opencl" if on == "opencl" else "host"]}


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if not config.getoption("--whole"):
        left_out = {item for item in ours if zlib.crc32(item.name.encode()) % PART}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    expected = _expected(config.getoption("--on"))
    for item in ours:
        reasons = [reason for pattern, reason in expected.items() if fnmatchcase(item.name, pattern)]
        if reasons:
            item.add_marker(pytest.mark.xfail(reason=reasons[0], strict=True))
