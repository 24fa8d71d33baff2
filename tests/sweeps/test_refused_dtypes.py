"""Dtypes that PyTorch refuses on CPU and CUDA are refused, but for those that are listed here:
`tests/sweeps/refused_dtypes_sweep.py`, with a driver that executes nothing.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import driver_packages
import pytest
import refused_dtypes_sweep
import sweep_process
import torch

# What is served all the same, and why.
SERVED = {
    r"special\..* (float16|bfloat16)": "computed in float32 and rounded, as all other functions of one number are",
    r"nn\.functional\.max_pool1d u?int\d+": "composed of max_pool2d, which the CPU has for integers",
    r"nn\.functional\.dropout complex\d+": "native_dropout, which the CPU has for complex numbers",
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_no_dtype_is_served_that_pytorch_refuses_everywhere(tmp_path: Path) -> None:
    settings = driver_packages.install_null(tmp_path)
    names = refused_dtypes_sweep.names("")
    found = sweep_process.findings("refused_dtypes_sweep.py", names, settings, "--samples", "2")
    assert [one for one in found if not any(re.fullmatch(pattern, one) for pattern in SERVED)] == []
    for pattern in SERVED:
        assert any(re.fullmatch(pattern, one) for one in found), f"nobody serves {pattern}"


@pytest.mark.parametrize("name", ["adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d"])
def test_integers_are_not_pooled_adaptively(name: str) -> None:
    x = torch.ones(2, 3, 4, 4, dtype=torch.int64, device="bp")
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        getattr(torch.nn.functional, name)(x if "2d" in name else x[None], 2)
