"""A fixture for tests that run programs on the OpenCL driver."""

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
    """Skips the tests if no OpenCL device is usable."""
    on_opencl.require_platform()
    result = forked.run(LIST, tmp_path_factory.mktemp("site"), TORCH_BACKPLANE_DRIVERS="opencl")
    assert result.returncode == 0, result.stderr
    if not result.stdout.strip():
        on_opencl.missing(f"no OpenCL device is usable {result.stderr.strip()}")
