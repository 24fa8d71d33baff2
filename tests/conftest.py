"""What every test needs: four host devices, one computing thread, and a way to run a program in a fresh interpreter.

TORCH_BACKPLANE_DRIVERS and its like in the environment put the tests on other devices.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

# Before anything imports torch, which imports torch_backplane and reads these.
os.environ.setdefault("TORCH_BACKPLANE_DRIVERS", "host")
os.environ.setdefault("TORCH_BACKPLANE_HOST_DEVICES", "4")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """run_python(code, **env): runs code in a fresh interpreter with env added to the environment (None removes)."""

    def run(code: str, timeout: float = 120, **env: str | None) -> subprocess.CompletedProcess[str]:
        merged = {**os.environ, **env}
        return subprocess.run(
            [sys.executable, "-c", code],
            env={name: value for name, value in merged.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
