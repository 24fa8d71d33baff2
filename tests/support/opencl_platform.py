"""A fixture for tests whose programs use the OpenCL driver."""

from __future__ import annotations

import forked
import on_opencl
import pytest

LIST = """
import torch
from torch_backplane import _C
print(*(_C.device_properties(i).driver for i in range(torch.accelerator.device_count())))
"""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips if no OpenCL device can be used."""
    on_opencl.require_platform()
    result = forked.run(LIST, tmp_path_factory.mktemp("site"), TORCH_BACKPLANE_DRIVERS="opencl")
    assert result.returncode == 0, result.stderr
    if not result.stdout.strip():
        on_opencl.missing(f"there is no device that can be used {result.stderr.strip()}")
