"""Fixtures that run programs on emulated HIP devices, each in a separate process."""

from __future__ import annotations

import on_hip
import pytest
from emulated_programs import result, run  # noqa: F401  # fixtures

# In `make test`, of the tests that run programs.
QUICK = {
    "test_graphs_are_replayed",
    "test_kernels_have_no_ptx",
    "test_properties_come_from_the_device",
    "test_small_kernels_agree_with_the_cpu",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        runs_programs = item.path.parent.name == "hip" and "emulator" in getattr(item, "fixturenames", ())
        if runs_programs and getattr(item, "originalname", "") not in QUICK:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def emulator() -> dict[str, str]:
    """Returns the environment variables with which a program uses four emulated devices."""
    return on_hip.environment()
