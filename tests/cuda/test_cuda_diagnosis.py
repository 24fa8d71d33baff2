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
    assert modules == " ".join(f"torch_backplane.drivers.cuda.{one}" for one in ("driver", "library", "platforms"))
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


# --- with a driver ------------------------------------------------------------------------------------------------


def first_missing(finished: subprocess.CompletedProcess[str]) -> str:
    assert finished.returncode == 0, finished.stderr
    return next(line for line in finished.stdout.splitlines() if line.startswith("False|"))


def test_all_findings(result: Run) -> None:
    finished = result(FINDINGS, CUDA_EMULATOR_DEVICES="2")
    assert finished.returncode == 0, finished.stderr
    *found, _ = finished.stdout.splitlines()
    assert [line.split(":")[0] for line in found] == [
        *("True|libcuda", "True|cuda-bindings", "True|CUDA", "True|NVRTC", "True|GPU 0", "True|GPU 1"),
        *("True|cuBLAS", "True|cuBLASLt", "True|cuDNN", "True|cuFFT", "True|cuSOLVER", "True|NCCL"),
    ]
    assert found[2] == "True|CUDA: NVIDIA's driver supports CUDA 13.0|"
    assert found[4] == "True|GPU 0: Emulated CUDA device 0, compute capability 8.0|"


@pytest.mark.parametrize(
    ("settings", "missing", "remedy"),
    [
        (
            {"CUDA_EMULATOR_VERSION": "11080"},
            "CUDA: NVIDIA's driver supports CUDA 11.8, and 12.0 is required",
            "update NVIDIA's driver",
        ),
        (
            {"CUDA_EMULATOR_VERSION": "12040"},
            "NVRTC: version 13.0 is newer than NVIDIA's driver, which supports CUDA 12.4",
            "update NVIDIA's driver, or pip install 'cuda-bindings==12.*' nvidia-cuda-nvrtc-cu12",
        ),
        ({"TORCH_BACKPLANE_NVRTC_LIBRARY": "/nowhere.so"}, "NVRTC: OSError: /nowhere.so", "nvidia-cuda-nvrtc"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA: cuInit answered CUDA_ERROR_NO_DEVICE (100)", ""),
        (
            {"CUDA_EMULATOR_FAULTS": "cuInit:1:803"},
            "CUDA: cuInit answered CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)",
            "",
        ),
        ({"CUDA_EMULATOR_FAULTS": "cuInit:1:802"}, "CUDA: cuInit answered CUDA_ERROR_SYSTEM_NOT_READY (802)", ""),
    ],
)
def test_what_is_missing_is_named_with_a_remedy(
    result: Run, settings: dict[str, str], missing: str, remedy: str
) -> None:
    line = first_missing(result(FINDINGS, **settings))
    assert line.startswith(f"False|{missing}")
    assert line.rpartition("|")[2].endswith(remedy)


def test_the_chosen_nvrtc_is_used_though_another_is_loaded(result: Run, tmp_path: Path) -> None:
    """CUDA builds of PyTorch load their NVRTC."""
    pytest.importorskip("nvidia.cu13", reason="needs nvidia-cuda-nvrtc")
    program = """
import ctypes, pathlib, nvidia.cu13
ctypes.CDLL(str(next(pathlib.Path(nvidia.cu13.__path__[0]).glob("lib/libnvrtc.so.13"))))
import torch
print((torch.ones(3, device="bp") + 1).tolist())
"""
    finished = result(program, TORCH_BACKPLANE_CACHE_DIR=str(tmp_path))
    assert finished.stdout == "[2.0, 2.0, 2.0]\n", finished.stderr


def test_a_gpu_that_is_too_old_is_skipped_with_a_warning(result: Run) -> None:
    finished = result(FINDINGS, CUDA_EMULATOR_ARCHITECTURE="61")
    line = first_missing(finished)
    assert line.startswith("False|GPU 0: is skipped: UnsupportedArchitecture: its compute capability is 6.1, and NVRTC")
    assert "torch_backplane: CUDA GPU 0 is skipped: UnsupportedArchitecture" in finished.stderr


def test_a_gpu_that_cannot_be_queried_is_skipped_and_others_work(result: Run) -> None:
    finished = result(
        "import torch; print(torch.ones(2, device='bp').tolist(), torch.bp.device_count())",
        CUDA_EMULATOR_FAULTS="cuDeviceGetName:1:999",
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "[1.0, 1.0] 3\n"
    assert "CUDA GPU 0 is skipped: DeviceError: cuDeviceGetName answered CUDA_ERROR_UNKNOWN (999)" in finished.stderr
