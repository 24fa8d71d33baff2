"""Runs conformance tests on the example of a third-party driver (examples/drivers/toy).

This file runs a selection of operators. `python -m torch_backplane conformance --driver toy` runs all of them, if the
package is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from driver_packages import install_toy, python_path

SELECTION = (
    "^(add|mul|sum|cat|where|sort|index_put|gather|matmul|var_mean|linalg.svd|fft.fft|"
    "nn.functional.(conv2d|layer_norm|dropout|embedding|scaled_dot_product_attention))$"
)


@pytest.mark.slow
def test_toy_driver_passes_conformance(tmp_path: Path) -> None:
    install_toy(tmp_path)
    environment = os.environ | {
        "PYTHONPATH": python_path(tmp_path),
        "TORCH_BACKPLANE_FALLBACK": "silent",
    }
    command = ["conformance", "--driver", "toy", "--match", SELECTION, "--dtypes", "float32", "--grad", "--jobs", "1"]
    result = subprocess.run(
        [sys.executable, "-m", "torch_backplane", *command],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "All passed" in result.stdout
    assert "failed 0" in result.stdout
