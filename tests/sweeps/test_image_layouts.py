"""Results for images have the CPU's layouts: channels-last in 2 and 3 dimensions, batched and not, with gradients.

A sample; `python tests/sweeps/sweep_process.py image_layouts_sweep.py` runs the whole operator database.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import driver_packages
import image_layouts_sweep
import pytest
import sweep_process

SAMPLE = "pool|pad|interpolate|conv[123]d|_norm|unpool|grid_sample|unfold|^add$|^cat$|softmax|flip|roll|cumsum|relu"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.slow
def test_layouts_of_results_match_cpu(tmp_path: Path) -> None:
    settings = driver_packages.install_null(tmp_path)
    names = image_layouts_sweep.names(SAMPLE)
    assert len(names) > 60
    assert sweep_process.findings("image_layouts_sweep.py", names, settings, "--samples", "5") == []
