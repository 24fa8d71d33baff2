"""Dtypes that PyTorch refuses on the CPU and on CUDA are refused, except those listed here.

Runs `tests/sweeps/refused_dtypes_sweep.py` with a driver that executes nothing.
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

# The exceptions, with reasons.
SERVED = {
    r"special\..* (float16|bfloat16)": "computed in float32 and rounded, like all other unary functions",
    r"nn\.functional\.max_pool1d u?int\d+": "composed of max_pool2d, which supports integers on the CPU",
    r"nn\.functional\.dropout complex\d+": "native_dropout, which supports complex numbers on the CPU",
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.slow
def test_dtypes_that_pytorch_refuses_everywhere_are_refused(tmp_path: Path) -> None:
    settings = driver_packages.install_null(tmp_path)
    names = refused_dtypes_sweep.names("")
    found = sweep_process.findings("refused_dtypes_sweep.py", names, settings, "--samples", "2")
    assert [one for one in found if not any(re.fullmatch(pattern, one) for pattern in SERVED)] == []
    for pattern in SERVED:
        assert any(re.fullmatch(pattern, one) for one in found), f"no dtype matches {pattern}"


@pytest.mark.parametrize("name", ["adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d"])
def test_adaptive_pooling_of_integers_is_refused(name: str) -> None:
    x = torch.ones(2, 3, 4, 4, dtype=torch.int64, device="bp")
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        getattr(torch.nn.functional, name)(x if "2d" in name else x[None], 2)
