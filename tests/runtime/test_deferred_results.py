"""A part of deferred_sweep.py: deferred operators give the results and errors of immediate ones."""

from __future__ import annotations

import os
import subprocess
import sys

import paths
import pytest

SWEEP = paths.SWEEPS / "deferred_sweep.py"


@pytest.mark.slow
def test_results_and_errors_of_some_families() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", str(SWEEP), "--samples", "2"),
            *("--ops", "glu|pad|norm|conv|shuffle|pool|isin|bitwise|cholesky|loss|interpolate|nonzero"),
        ],
        env={**os.environ, "TORCH_BACKPLANE_DRIVERS": "host", "TORCH_BACKPLANE_HOST_ASYNC": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
