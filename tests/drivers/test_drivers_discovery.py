"""Tests how drivers are discovered, ordered, selected by the user, and skipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from driver_packages import EXAMPLES, MINIMAL, install, install_toy, python_path

LIST = """
import torch
from torch_backplane import _C
print(" ".join(f"{p.driver}/{p.name}" for p in map(_C.device_properties, range(torch.accelerator.device_count()))))
"""
# Like LIST, but raises an error where device_count() returns 0.
USE = 'import torch; print(torch.empty(1, device="bp:0").device)'

# A driver with two devices of different names.
PAIR = MINIMAL.replace("return [MinimalDevice()]", "return [named('first'), named('second')]") + '''
def named(name):
    device = MinimalDevice()
    device.properties = DeviceProperties(name=name, total_memory=1 << 26)
    return device
'''

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Returns run(code, **env) with the drivers installed in tmp_path, one host device, and no OpenCL platform."""
    defaults = {
        "TORCH_BACKPLANE_DRIVERS": None,
        "TORCH_BACKPLANE_HOST_DEVICES": "1",
        "OCL_ICD_VENDORS": str(tmp_path / "no platforms"),
    }
    return lambda code, **env: forked.run(code, tmp_path, **defaults | env)


def names(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    return [entry.split("/")[0] for entry in result.stdout.split()]


def error_of(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1, result.stderr
    return result.stderr.strip().splitlines()[-1]


# --- discovery and order -----------------------------------------------------------------------------------------


def test_other_devices_precede_host_devices(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "zebra", MINIMAL, "MinimalDriver")
    install(tmp_path, "ant", MINIMAL, "MinimalDriver")
    listed = run(LIST)
    assert listed.stdout.startswith("ant/Minimal zebra/Minimal host/")


def test_priority_orders_drivers(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "ant", MINIMAL.replace("(Driver):", "(Driver):\n    priority = -20"), "MinimalDriver")
    install(tmp_path, "zebra", MINIMAL.replace("(Driver):", "(Driver):\n    priority = 5"), "MinimalDriver")
    listed = run(LIST)
    assert listed.stdout.startswith("zebra/Minimal host/")
    assert listed.stdout.endswith("ant/Minimal\n")


def test_gpus_come_first_and_cpus_last(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "ant", MINIMAL.replace("1 << 26", "1 << 26, kind='cpu'"), "MinimalDriver")
    install(tmp_path, "bee", MINIMAL, "MinimalDriver")
    mixed = PAIR.replace("1 << 26)\n    return", "1 << 26, kind='gpu' if name == 'second' else 'cpu')\n    return")
    install(tmp_path, "zebra", mixed, "MinimalDriver")
    listed = run(LIST)
    assert listed.stdout.startswith("zebra/second bee/Minimal ant/Minimal zebra/first host/")
    named = run(LIST, TORCH_BACKPLANE_DRIVERS="ant,zebra")  # the user's order of drivers; the drivers' order of devices
    assert named.stdout == "ant/Minimal zebra/first zebra/second\n"


def test_environment_variable_selects_and_orders_drivers(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "ant", MINIMAL, "MinimalDriver")
    install(tmp_path, "bee", MINIMAL, "MinimalDriver")
    assert names(run(LIST, TORCH_BACKPLANE_DRIVERS="bee, ant")) == ["bee", "ant"]


def test_unselected_drivers_are_not_imported(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "ant", "raise SystemExit('imported')", "MinimalDriver")
    assert names(run(LIST, TORCH_BACKPLANE_DRIVERS="host"))[0] == "host"
    assert names(run(LIST, TORCH_BACKPLANE_VISIBLE_DEVICES="host"))[0] == "host"


def test_importing_the_package_imports_no_driver_and_reads_no_metadata(run_python: Run, tmp_path: Path) -> None:
    install(tmp_path, "ant", "raise SystemExit('imported')", "MinimalDriver")
    code = """
import sys
import torch
before = set(sys.modules)
import torch_backplane
new = set(sys.modules) - before
assert not any(name.startswith("importlib.metadata") for name in new), sorted(new)
assert "torch_backplane.drivers.host" not in new and "torch_backplane.drivers.sizes" not in new
assert not torch_backplane._C.is_discovered()
"""
    result = run_python(code, PYTHONPATH=python_path(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 0, result.stderr


def test_visible_devices_selects_and_orders_devices(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "pair", PAIR, "MinimalDriver")
    listed = run(LIST, TORCH_BACKPLANE_VISIBLE_DEVICES="pair:1,host:0,pair:0")
    assert listed.stdout.startswith("pair/second host/")
    assert listed.stdout.endswith("pair/first\n")
    assert names(run(LIST, TORCH_BACKPLANE_VISIBLE_DEVICES="host,pair"))[-2:] == ["pair", "pair"]
    assert names(run(LIST, TORCH_BACKPLANE_VISIBLE_DEVICES="")) == []


def test_example_driver_installs_with_pip(run: Run, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    source = shutil.copytree(EXAMPLES / "toy", tmp_path_factory.mktemp("toy") / "toy")  # setuptools builds in place
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*pip, "--target", str(tmp_path), str(source)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    listed = run(LIST, TOY_DEVICES="3")
    assert listed.stdout.startswith("toy/Toy accelerator 0 toy/Toy accelerator 1 toy/Toy accelerator 2 host/")


# --- drivers that fail -------------------------------------------------------------------------------------------

BROKEN = {
    "devices() raises": (
        MINIMAL.replace("return [MinimalDevice()]", "raise RuntimeError('no firmware')"), "RuntimeError: no firmware"
    ),
    "devices() raises ValueError": (
        MINIMAL.replace("return [MinimalDevice()]", "return [int('many')]"), "ValueError: invalid literal"
    ),
    "the module cannot be imported": ("import missing_library", "No module named 'missing_library'"),
    "the class is missing": ("", "has no attribute 'MinimalDriver'"),
    "the class is not a Driver": ("class MinimalDriver: pass", "is not a subclass of torch_backplane.drivers.Driver"),
    "a device is not a Device": (
        MINIMAL.replace("[MinimalDevice()]", "['gpu0']"), "'gpu0', which is not a torch_backplane.drivers.Device"
    ),
    "a method is missing": (MINIMAL.replace("def free", "def free_"), "Can't instantiate abstract class"),
    "properties are missing": (MINIMAL.replace("    properties =", "    facts ="), "no attribute 'properties'"),
    "negative memory": (
        MINIMAL.replace("1 << 26", "-1"), "total_memory is -1, and must be a whole number of bytes above 0"
    ),
    "no name": (MINIMAL.replace('"Minimal"', '" "'), "name is ' ', and must be a string that is not empty"),
    "unknown dtype": (
        MINIMAL.replace("1 << 26", "1 << 26, dtypes=['float128']"), "must be a sequence of torch.dtype"
    ),
    "malformed capability": (
        MINIMAL.replace("1 << 26", "1 << 26, capability=(9,)"), "capability is (9,), and must be a pair"
    ),
    "unknown kind": (
        MINIMAL.replace("1 << 26", "1 << 26, kind='tpu'"), "kind is 'tpu', and must be one of gpu, accelerator, cpu"
    ),
    "the target is not a Target": (
        MINIMAL.replace("1 << 26", "1 << 26, target={'simt': False}"),
        "target is {'simt': False}, and must be a torch_backplane.kernels.Target, or None",
    ),
    "an invalid target": (
        "from torch_backplane.kernels import Target\n"
        + MINIMAL.replace("1 << 26", "1 << 26, target=Target(local_memory=-1)"),
        "ValueError: Target.local_memory is -1, and must be a whole number of bytes, 0 or more",
    ),
    "host-accessible without addresses": (
        MINIMAL.replace("1 << 26", "1 << 26, address_space='host'"), "but no address() method"
    ),
    "an asynchronous device without all methods": (
        MINIMAL.replace("    def free", "    def create_stream(self, priority): return object()\n    def free"),
        "an asynchronous device also needs query_stream, synchronize_stream",
    ),
    "an unknown sensor": (
        MINIMAL.replace("    def free", "    sensors = ['fan']\n    def free"),
        "MinimalDevice.sensors has 'fan'; known are temperature, power_draw,",
    ),
    "sensors that are one string": (
        MINIMAL.replace("    def free", "    sensors = 'temperature'\n    def free"),
        "sensors is 'temperature', and must be a sequence or set of names",
    ),
    "sensors without a method": (
        MINIMAL.replace("    def free", "    sensors = ('temperature',)\n    def free"),
        "MinimalDevice must have both sensors and read_sensor(), or neither",
    ),
    "a method without sensors": (
        MINIMAL.replace("    def free", "    def read_sensor(self, name): return 1\n    def free"),
        "MinimalDevice must have both sensors and read_sensor(), or neither",
    ),
    "it uses bp during discovery": (
        MINIMAL.replace("return [MinimalDevice()]", "import torch; return [torch.empty(1, device='bp')]"),
        "used bp devices during discovery",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_driver_is_skipped_with_one_warning(run: Run, tmp_path: Path, kind: str) -> None:
    source, reason = BROKEN[kind]
    install(tmp_path, "broken", source, "MinimalDriver")
    install(tmp_path, "good", MINIMAL, "MinimalDriver")
    result = run(
        "import warnings; warnings.simplefilter('always')\n"  # also show a repeated warning
        f"{LIST}\nfrom torch_backplane import drivers; print(drivers.failures()['broken'])"
    )
    assert result.returncode == 0, result.stderr
    listed, failure = result.stdout.splitlines()
    assert listed.startswith("good/Minimal host/")
    assert reason in failure
    assert result.stderr.count("driver 'broken' is skipped") == 1
    assert reason in result.stderr


def test_driver_name_of_two_packages_is_skipped(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "twin", MINIMAL, "MinimalDriver", distribution="one")
    install(tmp_path, "twin", MINIMAL, "MinimalDriver", distribution="two")
    result = run(LIST)
    assert "twin" not in names(result)
    assert result.stderr.count("driver 'twin' is skipped: several packages claim the name: one_module") == 1


def test_packages_cannot_replace_built_in_drivers(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "host", MINIMAL, "MinimalDriver")
    result = run(LIST)
    assert names(result)[0] == "host"
    assert "Minimal" not in result.stdout
    assert result.stderr.count("driver 'host' is torch_backplane.drivers.host:HostDriver; other packages") == 1


# --- invalid settings --------------------------------------------------------------------------------------------

WRONG_SETTINGS = [
    ({"TORCH_BACKPLANE_DRIVERS": "host,cuba"}, "names 'cuba'; installed drivers: cuda, hip, host"),
    ({"TORCH_BACKPLANE_DRIVERS": " , "}, "names no driver; installed drivers: cuda, hip, host"),
    ({"TORCH_BACKPLANE_HOST_DEVICES": "two"}, "TORCH_BACKPLANE_HOST_DEVICES='two' is not a whole number from 0 to 64"),
    ({"TORCH_BACKPLANE_HOST_DEVICES": "65"}, "is not a whole number from 0 to 64"),
    ({"TORCH_BACKPLANE_HOST_DEVICES": "-1"}, "is not a whole number from 0 to 64"),
    ({"TORCH_BACKPLANE_HOST_MEMORY": "2 gigs"}, "TORCH_BACKPLANE_HOST_MEMORY='2 gigs' is not a size"),
    ({"TORCH_BACKPLANE_HOST_MEMORY": "0"}, "is not a size: write a number above 0"),
    ({"TORCH_BACKPLANE_HOST_MEMORY": "-2GiB"}, "is not a size"),
    ({"TORCH_BACKPLANE_HOST_MEMORY": "9" * 30}, "is not a size"),
    ({"TORCH_BACKPLANE_TARGET": "ada"}, "TORCH_BACKPLANE_TARGET='ada': the target ada cannot be read"),
    ({"TORCH_BACKPLANE_DISCRETE": "yes"}, "TORCH_BACKPLANE_DISCRETE='yes' is neither 0 nor 1"),
    ({"TORCH_BACKPLANE_VISIBLE_DEVICES": "host:1"}, "names host:1; driver 'host' has 1 device, counted from host:0"),
    ({"TORCH_BACKPLANE_VISIBLE_DEVICES": "host:-1"}, "has the entry 'host:-1'; write driver:index"),
    ({"TORCH_BACKPLANE_VISIBLE_DEVICES": "host:0,,"}, "has the entry ''; write driver:index"),
    ({"TORCH_BACKPLANE_VISIBLE_DEVICES": "0"}, "names the driver '0'; available drivers: cuda, hip, host"),
    ({"TORCH_BACKPLANE_VISIBLE_DEVICES": "host:0,host:0"}, "names devices of 'host:0' more than once"),
    ({"TORCH_BACKPLANE_VISIBLE_DEVICES": "host:0,host"}, "names devices of 'host' more than once"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG_SETTINGS)
def test_wrong_settings_are_errors(run: Run, settings: dict[str, str], message: str) -> None:
    assert message in error_of(run(USE, **settings))


def test_selecting_a_failed_driver_is_an_error(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "broken", BROKEN["devices() raises"][0], "MinimalDriver")
    message = error_of(run(USE, TORCH_BACKPLANE_VISIBLE_DEVICES="broken:0"))
    assert "names the driver 'broken', which failed: RuntimeError: no firmware" in message


def test_drivers_can_reject_their_settings(run: Run, tmp_path: Path) -> None:
    install_toy(tmp_path)
    assert "TOY_MEMORY='lots' is not a size" in error_of(run(USE, TOY_MEMORY="lots"))


def test_too_many_devices(run: Run, tmp_path: Path) -> None:
    install_toy(tmp_path)
    message = error_of(run(USE, TOY_DEVICES="64"))
    assert "65 bp devices were found; at most 64 are supported" in message
    assert names(run(LIST, TOY_DEVICES="64", TORCH_BACKPLANE_DRIVERS="toy")).count("toy") == 64


def test_an_interrupt_during_discovery_is_not_lost(run: Run, tmp_path: Path) -> None:
    """The number of devices comes from a function that cannot throw: the interrupt arrives right after it."""
    source = MINIMAL.replace("return [MinimalDevice()]", "import signal; signal.raise_signal(signal.SIGINT); return []")
    install(tmp_path, "interrupted", source, "MinimalDriver")
    code = """
import signal, torch
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    torch.accelerator.device_count()
    for _ in range(1000):
        pass
except KeyboardInterrupt:
    print("interrupted")
"""
    result = run(code, TORCH_BACKPLANE_DRIVERS="interrupted")
    assert result.stdout == "interrupted\n", result.stderr
