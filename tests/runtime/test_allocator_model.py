"""The caching allocator, compared block by block with a model of its rules (allocator_model.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import paths
import pytest

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
EXAMPLES = 20
STEPS = 10_000  # of all configurations together


def run_machine(configuration: str, *numbers: int) -> dict[str, Any]:
    """Returns the report of allocator_machine.py. `numbers`: the number of examples and the seed."""
    environment = os.environ | {
        "TORCH_BACKPLANE_DRIVERS": "host",
        "TORCH_BACKPLANE_HOST_MEMORY": "80MiB",
        "TORCH_BACKPLANE_HOST_DEVICES": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTORCH_ALLOC_CONF", None)
    result = subprocess.run(
        [sys.executable, str(paths.SUPPORT / "allocator_machine.py"), configuration, *map(str, numbers)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.slow
def test_agrees_with_the_model(configuration: str, pytestconfig: pytest.Config) -> None:
    report = run_machine(configuration, EXAMPLES, pytestconfig.getoption("--seed"))
    assert report["configuration"] == configuration
    assert report["steps"] >= STEPS / len(CONFIGURATIONS)
    assert min(report["ooms"], report["retries"], report["waits"]) > 0


@pytest.mark.slow
def test_the_seed_determines_the_programs() -> None:
    first, again, other = (run_machine("default", 3, seed)["programs"] for seed in (0, 0, 1))
    assert first == again != other
