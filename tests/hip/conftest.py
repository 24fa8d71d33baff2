"""Fixtures for tests of the HIP driver on emulated devices. Each program runs in a separate process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import on_hip
import pytest

Run = Callable[..., str]


@pytest.fixture(scope="session")
def emulator() -> dict[str, str]:
    """Returns the environment variables with which a program uses four emulated devices."""
    return on_hip.environment()


@pytest.fixture
def result(
    run_python: Callable[..., subprocess.CompletedProcess[str]], emulator: dict[str, str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """result(code, **env): runs code on emulated devices and returns the finished process."""
    settings = emulator | {"TORCH_BACKPLANE_FALLBACK": "silent"}
    return lambda code, **env: run_python(code, timeout=600, **settings | env)


@pytest.fixture
def run(result: Callable[..., subprocess.CompletedProcess[str]]) -> Run:
    """run(code, **env): runs code on emulated devices and returns what it printed. Fails if the program fails."""

    def run(code: str, **env: str) -> str:
        finished = result(code, **env)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    return run
