"""Tests what the CUDA driver says about a machine where something that it needs is missing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

FINDINGS = """
import sys
from torch_backplane import drivers
for one in drivers.findings()["cuda"]:
    print(one.ok, f"{one.what}: {one.found}", one.remedy, sep="|")
print(*sorted(name for name in sys.modules if name.startswith("torch_backplane.drivers.cuda.")))
"""


def test_without_libcuda_nothing_is_imported(run_python: Run, tmp_path: Path) -> None:
    missing = tmp_path / "libcuda.so.1"
    result = run_python(FINDINGS, TORCH_BACKPLANE_DRIVERS="cuda,host", TORCH_BACKPLANE_CUDA_LIBRARY=str(missing))
    assert result.returncode == 0, result.stderr
    finding, modules = result.stdout.splitlines()
    assert finding.startswith(f"False|libcuda: {missing}: cannot open")
    assert finding.endswith("|install NVIDIA's driver; in a container: docker run --gpus all")
    assert modules == "torch_backplane.drivers.cuda.driver torch_backplane.drivers.cuda.library"
    assert "names the driver 'cuda', which has no devices. libcuda: " in result.stderr


def test_there_is_no_warning_if_the_driver_is_not_named(run_python: Run, tmp_path: Path) -> None:
    code = "import torch; print(torch.accelerator.device_count() > 0)"
    missing = str(tmp_path / "libcuda.so.1")
    result = run_python(code, TORCH_BACKPLANE_DRIVERS=None, TORCH_BACKPLANE_CUDA_LIBRARY=missing)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True\n"
    assert "cuda" not in result.stderr


def test_a_library_that_is_not_libcuda(run_python: Run) -> None:
    library = "libm.so.6"
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    result = run_python(FINDINGS, TORCH_BACKPLANE_DRIVERS="cuda,host", TORCH_BACKPLANE_CUDA_LIBRARY=library)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"True|libcuda: {library}|"
    assert lines[1].startswith("True|cuda-bindings: version ")
    assert lines[2].startswith("False|CUDA: ")
