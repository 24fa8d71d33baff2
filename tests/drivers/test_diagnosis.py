"""Tests what Backplane says about drivers without devices: findings, warnings and errors, and the GPUs of a machine."""

from __future__ import annotations

import grp
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from driver_packages import MINIMAL, RAISED, install

from torch_backplane.drivers import Finding, diagnosis
from torch_backplane.drivers.opencl import machine

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# A driver without devices that says why.
EMPTY = MINIMAL.replace("return [MinimalDevice()]", "return []") + '''
    def diagnose(self):
        from torch_backplane.drivers import Finding
        return [Finding("firmware", True, "version 7"), Finding("card", False, "not plugged in", "plug it in")]
'''
COUNT = "import torch; print(torch.accelerator.device_count())"
USE = RAISED + 'import torch; print(raised(lambda: torch.empty(1, device="bp")))'
FINDINGS = """
from torch_backplane import drivers
for name, found in drivers.findings().items():
    for one in found:
        print(name, one.ok, f"{one.what}: {one.found}", one.remedy, sep="|")
print(drivers.reasons())
"""
WITHOUT_PYOPENCL = "import sys; sys.modules['pyopencl'] = None\n"  # as if it were not installed


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Returns run(code, **env) with the drivers installed in tmp_path, one host device, and no OpenCL platform."""
    (tmp_path / "vendors").mkdir()
    defaults = {
        "TORCH_BACKPLANE_DRIVERS": None,
        "TORCH_BACKPLANE_HOST_DEVICES": "1",
        "OCL_ICD_VENDORS": str(tmp_path / "vendors"),
    }
    return lambda code, **env: forked.run(code, tmp_path, **defaults | env)


# --- findings and reasons ----------------------------------------------------------------------------------------


def test_a_driver_without_devices_gives_its_first_failed_finding_as_the_reason() -> None:
    good, bad = Finding("a", True, "there"), Finding("b", False, "missing", "get it")
    assert diagnosis.reason([good, bad, Finding("c", False, "also")]) == "b: missing (get it)"
    assert diagnosis.reason([good, Finding("c", False, "broken")]) == "c: broken"
    assert diagnosis.reason([good]) == diagnosis.reason([]) == "it found no device"


def test_findings_of_all_kinds_of_drivers(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "empty", EMPTY, "MinimalDriver")
    install(tmp_path, "silent", MINIMAL.replace("return [MinimalDevice()]", "return []"), "MinimalDriver")
    broken = MINIMAL.replace("return [MinimalDevice()]", "raise OSError('no cable')")
    install(tmp_path, "broken", broken, "MinimalDriver")
    install(tmp_path, "clumsy", EMPTY.replace("return [Finding", "return [Fnding"), "MinimalDriver")
    result = run(WITHOUT_PYOPENCL + FINDINGS)
    assert result.returncode == 0, result.stderr
    *lines, reasons = result.stdout.splitlines()
    for line in (
        "empty|True|firmware: version 7|",
        "empty|False|card: not plugged in|plug it in",
        "broken|False|devices: OSError: no cable|",
        "clumsy|False|diagnose(): NameError: name 'Fnding' is not defined|",
        "host|True|host devices: 1|",
        "opencl|False|PyOpenCL: not installed|pip install pyopencl",
    ):
        assert line in lines
    assert "'empty': 'card: not plugged in (plug it in)'" in reasons
    assert "'silent': 'it found no device'" in reasons
    assert "host" not in reasons
    assert result.stderr.count("UserWarning") == 1  # about `broken` only: none of the others was asked for by name


def test_drivers_that_settings_exclude(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "empty", EMPTY, "MinimalDriver")
    by_drivers = run(FINDINGS, TORCH_BACKPLANE_DRIVERS="host").stdout
    excluded = "opencl|False|settings: TORCH_BACKPLANE_DRIVERS='host' excludes it|unset TORCH_BACKPLANE_DRIVERS"
    assert excluded in by_drivers
    assert by_drivers.splitlines()[-1] == "{}"
    by_devices = run(FINDINGS, TORCH_BACKPLANE_VISIBLE_DEVICES="host:0", TORCH_BACKPLANE_DRIVERS="host,empty").stdout
    assert "empty|False|settings: TORCH_BACKPLANE_VISIBLE_DEVICES='host:0' excludes it|" in by_devices
    assert "opencl|False|settings: TORCH_BACKPLANE_DRIVERS='host,empty' excludes it|" in by_devices


# --- warnings and errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["TORCH_BACKPLANE_DRIVERS", "TORCH_BACKPLANE_VISIBLE_DEVICES"])
@pytest.mark.slow
def test_a_driver_that_was_asked_for_by_name_says_why_it_has_no_devices(
    run: Run, tmp_path: Path, variable: str
) -> None:
    install(tmp_path, "empty", EMPTY, "MinimalDriver")
    unnamed = run(COUNT)
    assert (unnamed.stdout, unnamed.stderr) == ("1\n", "")
    named = run(COUNT, **{variable: "empty,host"})
    assert named.stdout == "1\n"
    expected = f"{variable} names the driver 'empty', which has no devices. card: not plugged in (plug it in)"
    assert named.stderr.count(expected) == 1
    opencl = run(WITHOUT_PYOPENCL + COUNT, **{variable: "opencl,host"})
    assert "which has no devices. PyOpenCL: not installed (pip install pyopencl)" in opencl.stderr


def test_selecting_a_device_of_a_driver_without_devices_names_the_reason(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "empty", EMPTY, "MinimalDriver")
    told = run(USE, TORCH_BACKPLANE_VISIBLE_DEVICES="empty:0").stdout
    assert "names empty:0; driver 'empty' has no devices. card: not plugged in (plug it in)" in told


def test_the_error_without_devices_names_the_reason_of_each_driver(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "empty", EMPTY, "MinimalDriver")
    cuda, hip = str(tmp_path / "libcuda.so.1"), str(tmp_path / "libamdhip64.so.6")
    libraries = {"TORCH_BACKPLANE_CUDA_LIBRARY": cuda, "TORCH_BACKPLANE_HIP_LIBRARY": hip}
    told = run(WITHOUT_PYOPENCL + USE, TORCH_BACKPLANE_HOST_DEVICES="0", **libraries).stdout
    assert told.startswith(f"RuntimeError: no bp device is available. cuda: libcuda: {cuda}: cannot open")
    assert f"; empty: card: not plugged in (plug it in); hip: libamdhip64: {hip}: cannot open" in told
    assert "; host: " in told
    assert "TORCH_BACKPLANE_HOST_DEVICES is 0 (unset TORCH_BACKPLANE_HOST_DEVICES)" in told
    assert "opencl: PyOpenCL: not installed (pip install pyopencl)" in told
    assert told.endswith("`python -m torch_backplane doctor` shows what was searched, and what to do\n")


def test_an_unusable_pyopencl_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pyopencl.py").write_text("raise ImportError('libOpenCL.so.1: cannot open shared object file')")
    told = run(FINDINGS).stdout
    assert "opencl|False|PyOpenCL: ImportError: libOpenCL.so.1: cannot open shared object file|pip install" in told


# --- the GPUs of a machine ---------------------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs, as folders sys and dev."""
    monkeypatch.setattr(machine, "SYS", tmp_path / "sys")
    monkeypatch.setattr(machine, "DEV", tmp_path / "dev")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    (tmp_path / "dev").mkdir()
    return tmp_path


def plug(system: Path, address: str, kind: str, vendor: str, node: str = "") -> None:
    folder = system / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "class").write_text(f"{kind}\n")
    (folder / "vendor").write_text(f"{vendor}\n")
    if node:
        path = system / "dev" / node
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_a_machine_without_gpus(system: Path) -> None:
    plug(system, "0000:00:1f.0", "0x060100", "0x8086")  # a bridge
    plug(system, "0000:01:00.0", "0x030000", "0x102b")  # the display of a server's console
    assert machine.gpus() == list(machine.nodes()) == list(machine.used(())) == []
    assert machine.install_command() == "apt-get install pocl-opencl-icd"
    assert machine.rusticl_setting() == ""


def test_gpus_that_opencl_does_not_list(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug(system, "0000:00:02.0", "0x030000", "0x8086", "dri/renderD128")
    plug(system, "0000:03:00.0", "0x030200", "0x10de")
    plug(system, "0000:04:00.0", "0x120000", "0x1002")
    intel, nvidia, amd = machine.used({0x1002})
    assert (intel.what, intel.ok) == ("Intel GPU at PCI 0000:00:02.0", False)
    assert (intel.found, intel.remedy) == ("no OpenCL implementation lists it", "apt-get install intel-opencl-icd")
    assert (nvidia.ok, nvidia.found) == (False, "there is no /dev/nvidia[0-9]*")
    assert "docker run --gpus all" in nvidia.remedy
    assert amd.ok
    assert machine.install_command() == "apt-get install intel-opencl-icd"
    assert machine.rusticl_setting() == "RUSTICL_ENABLE=iris,nouveau,radeonsi"
    (system / "dev/nvidia0").touch()
    assert list(machine.used({0x1002}))[1].remedy == "apt-get install nvidia-opencl-icd"
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.1")  # as in NVIDIA's containers
    monkeypatch.setattr(machine, "NVIDIA_ICD", str(system / "vendors/nvidia.icd"))
    remedy = list(machine.used({0x1002}))[1].remedy
    subprocess.run(["sh", "-ec", remedy], check=True)
    assert (system / "vendors/nvidia.icd").read_text() == "libnvidia-opencl.so.1\n"


def test_device_nodes_without_permission(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug(system, "0000:00:02.0", "0x030000", "0x8086", "dri/renderD128")
    assert list(machine.nodes()) == []
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may open everything
    monkeypatch.setattr(machine, "_group", lambda node: "render")
    (found,) = machine.nodes()
    assert found == Finding(
        str(system / "dev/dri/renderD128"), False, "no permission: it is for the group render",
        "sudo usermod -aG render $USER, then log in again",
    )  # fmt: skip
    monkeypatch.undo()
    assert machine._group(system) == grp.getgrgid(os.stat(system).st_gid).gr_name
