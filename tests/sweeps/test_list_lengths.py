"""Lists of integers of an invalid length raise the CPU's errors. The driver executes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import driver_packages
import list_lengths_sweep
import pytest
import sweep_process


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_invalid_lengths_raise_the_cpus_errors(tmp_path: Path) -> None:
    settings = driver_packages.install_null(tmp_path)
    found = sweep_process.findings(
        "list_lengths_sweep.py", list_lengths_sweep.names(""), settings, "--samples", "4"
    )
    assert found == []
