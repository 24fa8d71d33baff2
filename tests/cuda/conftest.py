"""Fixtures that run programs on emulated CUDA devices, each in a separate process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import on_cuda
import pytest

Run = Callable[..., str]


@pytest.fixture(scope="session")
def emulator() -> dict[str, str]:
    """Returns the environment variables with which a program uses four emulated devices."""
    if on_cuda.missing():
        pytest.skip(on_cuda.missing())
    return on_cuda.environment()


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder for compiled kernels, which programs of all tests share."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def result(
    run_python: Callable[..., subprocess.CompletedProcess[str]], emulator: dict[str, str], kernel_cache: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """result(code, **env): runs code on emulated devices and returns the finished process."""
    own = {"TORCH_BACKPLANE_CACHE_DIR": str(kernel_cache), "TORCH_BACKPLANE_FALLBACK": "silent"}
    return lambda code, **env: run_python(code, **emulator | own | env)


@pytest.fixture
def run(result: Callable[..., subprocess.CompletedProcess[str]]) -> Run:
    """run(code, **env): runs code on emulated devices and returns what it printed. Fails if the program fails."""

    def run(code: str, **env: str) -> str:
        finished = result(code, **env)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    return run
