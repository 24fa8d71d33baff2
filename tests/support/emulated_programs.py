"""Fixtures of tests/cuda and tests/hip that run programs on emulated devices, each in a separate process.

They use the fixture `emulator` of the folder, the environment variables with which a program uses the devices.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import paths
import pytest

Run = Callable[..., str]
Result = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def result(run_python: Result, emulator: dict[str, str]) -> Result:
    """result(code, timeout=seconds, **env): runs code on emulated devices and returns the finished process."""
    path = os.pathsep.join([str(paths.SUPPORT), os.environ.get("PYTHONPATH", "")])
    settings = emulator | {"TORCH_BACKPLANE_FALLBACK": "silent", "PYTHONPATH": path}
    return lambda code, timeout=600, **env: run_python(code, timeout=timeout, **settings | env)


@pytest.fixture
def run(result: Result) -> Run:
    """run(code, **env): runs code on emulated devices and returns what it printed. Fails if the program fails."""

    def run(code: str, **env: str) -> str:
        finished = result(code, **env)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    return run
