"""Tests what the HIP driver says where something is missing, and that a process uses CUDA or HIP, not both."""

from __future__ import annotations

from collections.abc import Callable

import on_cuda
import pytest

Run = Callable[..., str]

FINDINGS = """
import warnings
from torch_backplane.drivers.hip import HIPDriver
driver = HIPDriver()
print(len(driver.devices()))
for one in driver.diagnose():
    print(one.ok, f"{one.what}: {one.found} ({one.remedy})")
"""


@pytest.mark.parametrize(
    ("variables", "finding"),
    [
        ({"TORCH_BACKPLANE_HIP_LIBRARY": "/nowhere.so"}, "False libamdhip64: /nowhere.so: cannot open"),
        ({"TORCH_BACKPLANE_HIPRTC_LIBRARY": "/nowhere.so"}, "False libhiprtc: /nowhere.so: cannot open"),
        ({"HIP_EMULATOR_VERSION": "50731921"}, "False HIP: the version is 5.7, and 6.0 is required (update ROCm)"),
        ({"CUDA_EMULATOR_FAULTS": "hipInit:1:100"}, "False HIP: hipInit answered hipErrorNoDevice (100): "),
        ({"CUDA_EMULATOR_FAULTS": "hipGetDeviceCount:1:100"}, "False GPU: hipGetDeviceCount answered hipErrorNoDev"),
    ],
)
def test_what_is_missing(run: Run, variables: dict[str, str], finding: str) -> None:
    lines = run(FINDINGS, **variables).splitlines()
    assert lines[0] == "0"
    assert lines[-1].startswith(finding)


def test_a_library_without_a_function(run: Run, emulator: dict[str, str]) -> None:
    """libhiprtc has none of HIP's functions."""
    lines = run(FINDINGS, TORCH_BACKPLANE_HIP_LIBRARY=emulator["TORCH_BACKPLANE_HIPRTC_LIBRARY"]).splitlines()
    assert lines[0] == "0"
    assert "has no function hip" in lines[-1]
    assert lines[-1].endswith("(update ROCm)")


def test_found_devices(run: Run) -> None:
    lines = run(FINDINGS).splitlines()
    assert lines[0] == "4"
    assert "True HIP: version 6.3 ()" in lines
    assert "True GPU 3: Emulated HIP device 3, gfx1100 ()" in lines


def test_faulty_devices_are_skipped(run: Run) -> None:
    with_warning = FINDINGS.replace("import warnings", "import warnings; warnings.simplefilter('ignore')")
    lines = run(with_warning, CUDA_EMULATOR_FAULTS="hipDeviceTotalMem:2:999").splitlines()
    assert lines[0] == "3"
    assert any("False GPU 1: is skipped: DeviceError: hipDeviceTotalMem answered hipErrorUnk" in one for one in lines)


@pytest.mark.skipif(bool(on_cuda.missing()), reason=on_cuda.missing())
def test_a_process_uses_one_platform(run: Run) -> None:
    code = """
from torch_backplane.drivers.cuda import CUDADriver
from torch_backplane.drivers.hip import HIPDriver
first, second = (CUDADriver(), HIPDriver()) if ORDER else (HIPDriver(), CUDADriver())
print(len(first.devices()), len(second.devices()), second.diagnose()[-1].found, second.diagnose()[-1].remedy)
"""
    both = on_cuda.environment()
    del both["TORCH_BACKPLANE_DRIVERS"]
    for order, (used, other) in ((1, ("CUDA", "HIP")), (0, ("HIP", "CUDA"))):
        said = run(code.replace("ORDER", str(order)), **both).strip()
        assert said == f"4 0 this process uses {used}, and cannot use {other} as well set TORCH_BACKPLANE_DRIVERS"
