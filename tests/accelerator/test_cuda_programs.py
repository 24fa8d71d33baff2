"""Programs written for CUDA run unchanged on bp by `python -m torch_backplane run --as-cuda`, with the CPU's losses."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import on_opencl
import paths
import pytest

SCRIPTS = paths.SUPPORT / "cuda_scripts"
DRIVERS = ("host", "opencl")

# Scripts whose numbers are those of the CPU → the relative tolerance, and the absolute one.
COMPARED = {
    "data_parallel.py": (1e-3, 1e-3),
    "imagenet.py": (0.1, 0.05),  # float16 on the device, float32 on the CPU
    "legacy.py": (1e-3, 1e-2),
    "mnist.py": (0.02, 2e-3),
    "nanogpt.py": (0.02, 0.02),  # bfloat16 on the device
    "neural_style.py": (0.02, 1e-3),
    "word_language_model.py": (0.01, 1e-2),
}
# Scripts that draw numbers on the device, which differ from the CPU's, or that need CUDA. They check themselves.
SELF_CHECKING = {
    "benchmark.py": "error True",
    "dcgan.py": "fake on the GPU",
    "graphs.py": "losses ",
    "reinforce.py": "first ",
    "spawn.py": "1 cuda:",
    "vae.py": "Epoch: 5",
}


# The others are slow: `make test-all` runs them.
QUICK = {"mnist.py", "nanogpt.py", "graphs.py", "spawn.py"}


def cases(scripts: Iterable[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in scripts]


def run(*command: str, folder: Path, **environment: str) -> str:
    """Runs a script in a folder. Returns its stdout without comments."""
    ended = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_BACKPLANE_FALLBACK": "silent"} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    return "\n".join(line for line in ended.stdout.splitlines() if not line.startswith("#"))


@functools.cache
def on_cpu(name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return run(str(SCRIPTS / name), folder=Path(folder))


def as_cuda(name: str, driver: str, folder: Path) -> str:
    if driver == "opencl":
        on_opencl.require_platform()
    settings = {"TORCH_BACKPLANE_DRIVERS": driver, "TORCH_BACKPLANE_HOST_DEVICES": "2"}
    script = str(SCRIPTS / name)
    return run("-m", "torch_backplane", "run", "--as-cuda", script, folder=folder, **settings)


def numbers(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"-?\d+\.\d+", text)]


def test_every_script_is_tested() -> None:
    assert {path.name for path in SCRIPTS.iterdir() if path.suffix == ".py"} == {*COMPARED, *SELF_CHECKING}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", cases(COMPARED))
@pytest.mark.slow
def test_script_has_the_losses_of_the_cpu(name: str, driver: str, tmp_path: Path) -> None:
    relative, absolute = COMPARED[name]
    there = as_cuda(name, driver, tmp_path)
    assert re.sub(r"-?\d+\.\d+", "…", there) == re.sub(r"-?\d+\.\d+", "…", on_cpu(name))
    assert numbers(there) == pytest.approx(numbers(on_cpu(name)), rel=relative, abs=absolute)
    assert len(numbers(there)) >= 3


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", cases(SELF_CHECKING))
def test_script_that_checks_itself(name: str, driver: str, tmp_path: Path) -> None:
    printed = as_cuda(name, driver, tmp_path)
    assert SELF_CHECKING[name] in printed
    assert "nan" not in printed
