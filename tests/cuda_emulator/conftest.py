"""Fixtures for tests of the CUDA emulator. They need no GPU, and are skipped where there is a CUDA driver."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import driver_api as api
import emulator
import pytest

from torch_backplane.drivers.cuda import compiler


def _has_driver() -> bool:
    # In another process, because the library stays loaded.
    loads = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    return subprocess.run([sys.executable, "-c", loads], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="session")
def libraries() -> Path:
    if _has_driver():
        pytest.skip("this machine has a CUDA driver, and a process can have only one libcuda")
    # Of two libraries with a name, other tests of this process would find the one that was loaded first.
    with contextlib.suppress(Exception):  # NVRTC is not installed
        compiler.version()
    emulator.load()
    return emulator.library_folder()


@pytest.fixture(autouse=True)
def context(libraries: Path) -> Iterator[int]:
    """The primary context of device 0 is current; those of both devices are reset after the test."""
    api.call("cuInit", 0)
    made = api.result("cuDevicePrimaryCtxRetain", 0)
    api.call("cuCtxSetCurrent", made)
    yield made
    for one in api.calls():
        api.inject(one, 0, 0)
    for device in (0, 1):
        api.call("cuDevicePrimaryCtxReset_v2", device)
    api.call("cuCtxSetCurrent", 0)


@pytest.fixture
def second(context: int) -> int:
    """The primary context of device 1, which is not current."""
    return int(api.result("cuDevicePrimaryCtxRetain", 1))


@pytest.fixture(scope="session")
def run_apart(libraries: Path) -> Callable[..., str]:
    """Return a function that runs a script in another process with environment variables, and returns its output."""

    def run(script: str, **variables: str) -> str:
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
        variables = {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]), **variables}
        done = subprocess.run(
            [sys.executable, "-c", "import driver_api as api\n" + script],
            env={**os.environ, **variables}, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
