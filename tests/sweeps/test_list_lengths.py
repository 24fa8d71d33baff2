"""Lists of integers of a wrong length are refused as on the CPU; the driver executes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import driver_packages
import list_lengths_sweep
import pytest
import sweep_process


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_refused_as_on_the_cpu(tmp_path: Path) -> None:
    settings = driver_packages.install_null(tmp_path)
    found = sweep_process.findings(
        "list_lengths_sweep.py", list_lengths_sweep.names(""), settings, "--samples", "4"
    )
    assert found == []
