"""Tests the sensors of drivers that have all, some or none of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from driver_packages import MINIMAL, RAISED, install

Run = Callable[..., list[str]]

NAMES = ("temperature", "power_draw", "clock_rate", "utilization", "memory_usage", "device_memory_used")
PRINT_ALL = f"import torch\n{RAISED}\nfor name in {NAMES}:\n" + """
    try:
        print(name, getattr(torch.bp, name)())
    except Exception as error:
        print(name, f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Returns run(code, sensors): the lines that code prints on a driver with sensors and on the host driver."""

    def call(code: str, sensors: tuple[str, ...], method: str = "return 5 + len(name)") -> list[str]:
        source = MINIMAL.replace(
            "    def free", f"    sensors = {sensors}\n    def read_sensor(self, name): {method}\n    def free"
        )
        install(tmp_path, "test", source if sensors else MINIMAL, "MinimalDriver")
        settings = {"TORCH_BACKPLANE_DRIVERS": "test,host", "TORCH_BACKPLANE_HOST_DEVICES": "1"}
        result = forked.run(code, tmp_path, **settings)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return call


def test_all_sensors_reach_the_driver(run: Run) -> None:
    assert run(PRINT_ALL, NAMES) == [f"{name} {5 + len(name)}" for name in NAMES]


def test_without_sensors_errors_name_the_driver(run: Run) -> None:
    printed = run(PRINT_ALL, ())
    for name, line in zip(NAMES[:-1], printed, strict=False):
        assert line == (
            f"{name} NotImplementedError: bp:0 does not report its {name}: the driver test has no such sensor"
        )
    assert printed[-1] == "device_memory_used 0"


def test_a_driver_with_some_sensors(run: Run) -> None:
    printed = run(PRINT_ALL, ("temperature", "utilization"))
    works = {line.split()[0] for line in printed if "Error" not in line}
    assert works == {"temperature", "utilization", "device_memory_used"}


def test_errors_of_the_driver_are_unchanged(run: Run) -> None:
    code = f"import torch\n{RAISED}\nprint(raised(torch.bp.temperature))"
    assert run(code, ("temperature",), "raise OSError('no such file: ' + name)") == [
        "OSError: no such file: temperature"
    ]


def test_native_devices_have_no_sensors(run: Run) -> None:
    code = f"""
import torch
{RAISED}
print(raised(lambda: torch.bp.power_draw(1)))
x = torch.ones(1 << 20, device="bp:1")
print(torch.bp.device_memory_used("bp:1") >= x.nbytes)
print(raised(lambda: torch.bp.temperature(2)))
"""
    assert run(code, NAMES) == [
        "NotImplementedError: bp:1 does not report its power_draw: the driver host has no such sensor",
        "True",
        "AssertionError: Invalid device id: 2; the number of bp devices is 2",
    ]


def test_the_contract_lists_the_functions_of_torch_bp() -> None:
    from torch_backplane.drivers.base import SENSORS

    assert tuple(SENSORS) == NAMES
