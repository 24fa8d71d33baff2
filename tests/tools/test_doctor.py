"""Tests `python -m torch_backplane doctor`: findings, the program on each device, crashes, and exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import driver_packages
import pytest
from driver_packages import MINIMAL, install
from typer.testing import CliRunner, Result

from torch_backplane.cli import app

# A driver whose second device ends the process when memory is allocated.
THREE = "return [MinimalDevice(), Crashing(), MinimalDevice()]"
SECOND_CRASHES = MINIMAL.replace("return [MinimalDevice()]", THREE).replace('"Minimal"', f"'{'long name ' * 9}'") + '''
import os
class Crashing(MinimalDevice):
    def allocate(self, nbytes): os.abort()
'''


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for drivers, on a machine with one host device, without OpenCL, and with a terminal of 80 columns."""
    (tmp_path / "vendors").mkdir()
    monkeypatch.setenv("PYTHONPATH", driver_packages.python_path(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path / "vendors"))
    monkeypatch.setenv("TORCH_BACKPLANE_HOST_DEVICES", "1")
    monkeypatch.delenv("TORCH_BACKPLANE_DRIVERS", raising=False)
    monkeypatch.delenv("TORCH_BACKPLANE_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


def doctor() -> Result:
    result = CliRunner().invoke(app, ["doctor"])
    assert max(map(len, result.output.splitlines())) <= 80, result.output
    return result


def device_line(result: Result, index: int) -> str:
    (line,) = re.findall(rf"^bp:{index} .*$", result.stdout, re.MULTILINE)
    return str(line)


def test_missing_pyopencl_is_named_with_the_command_that_installs_it(site: Path) -> None:
    (site / "sitecustomize.py").write_text("import sys; sys.modules['pyopencl'] = None")  # as if not installed
    result = doctor()
    assert result.exit_code == 0, result.output
    assert re.search(r"driver host\n ok host devices: 1\n", result.stdout.replace(" \n", "\n"))
    told = " ".join(result.stdout.split())
    assert "✗ PyOpenCL: not installed → pip install pyopencl" in told
    line = device_line(result, 0)
    assert re.search(r"^bp:0 +host +.* [\d.]+ m?s +[\d.]+ m?s +[\d.]+ m?s +[\d.e+]+× +equal\s*$", line), line
    assert "1 of 1 devices work. bp:0 is the CPU. No GPU is used." in told


def test_exit_code_without_devices_and_with_a_malformed_setting(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_BACKPLANE_HOST_DEVICES", "0")
    result = doctor()
    assert result.exit_code == 1
    told = " ".join(result.stdout.split())
    assert "TORCH_BACKPLANE_HOST_DEVICES is 0 → unset TORCH_BACKPLANE_HOST_DEVICES" in told
    assert "No device works." in told
    monkeypatch.setenv("TORCH_BACKPLANE_HOST_DEVICES", "many")
    result = doctor()
    assert result.exit_code == 2
    assert "TORCH_BACKPLANE_HOST_DEVICES='many' is not a whole number" in " ".join(result.stderr.split())


@pytest.mark.slow
def test_wrong_results_are_no_working_device(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in driver_packages.install_null(site).items():
        monkeypatch.setenv(name, value)
    result = doctor()  # the null driver computes nothing
    assert result.exit_code == 1, result.output
    assert re.search(r" (wrong|failed)\s*$", device_line(result, 0))
    assert "No device works." in result.stdout


@pytest.mark.slow
def test_a_device_that_crashes_does_not_hide_the_others(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "mixed", SECOND_CRASHES, "MinimalDriver")
    monkeypatch.setenv("TORCH_BACKPLANE_DRIVERS", "mixed")
    result = doctor()
    assert result.exit_code == 0, result.output
    assert [device_line(result, index).split()[-1] for index in range(3)] == ["equal", "failed", "equal"]
    told = " ".join(result.stdout.split())
    assert "bp:1: the process that tried it ended with SIGABRT" in told
    assert re.search(r"bp:0: \d+ operators of the program ran on the CPU, with copies", told)
    assert "2 of 3 devices work. bp:0 is an accelerator." in told


def test_a_driver_that_crashes_is_named_and_the_others_work(site: Path) -> None:
    install(site, "fatal", MINIMAL.replace("return [MinimalDevice()]", "import os; os.abort()"), "MinimalDriver")
    result = doctor()
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    assert "driver fatal ✗ devices: the process that tried it ended with SIGABRT" in told
    assert "→ update the driver, or set TORCH_BACKPLANE_DRIVERS=cuda,hip,host,opencl" in told
    assert device_line(result, 0).split()[-1] == "equal"


def test_warnings_of_drivers_are_shown(site: Path) -> None:
    noisy = MINIMAL.replace("return [MinimalDevice()]", "import warnings; warnings.warn('old firmware'); return []")
    install(site, "noisy", noisy, "MinimalDriver")
    result = doctor()
    assert result.exit_code == 0, result.output
    assert "Warnings that programs get\n - old firmware" in result.stdout
