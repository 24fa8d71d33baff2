"""The caching allocator against the plain model of its rules (allocator_model.py), block for block."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
CONFIGURATIONS = (
    "default",
    "fraction",
    "garbage_collection",
    "max_split_size",
    "roundup",
    "large_segment",
    "expandable",
    "expandable_fraction",
)
STEPS = 10_000  # in all configurations together


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_agrees_with_the_model(configuration: str) -> None:
    environment = os.environ | {
        "TORCH_BACKPLANE_DRIVERS": "host",
        "TORCH_BACKPLANE_HOST_MEMORY": "80MiB",
        "TORCH_BACKPLANE_HOST_DEVICES": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTORCH_ALLOC_CONF", None)
    result = subprocess.run(
        [sys.executable, str(HERE / "allocator_machine.py"), configuration],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["configuration"] == configuration
    assert report["steps"] >= STEPS / len(CONFIGURATIONS)
    assert min(report["ooms"], report["retries"], report["waits"]) > 0
