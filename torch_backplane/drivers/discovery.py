"""Discovery: finds the drivers, gets the devices of each, and numbers the devices.

Drivers are found through the entry-point group `torch_backplane.drivers`. Discovery runs when bp is first used;
importing torch_backplane reads no package metadata and imports no driver.

TORCH_BACKPLANE_DRIVERS=opencl,host            use only these drivers; their devices are numbered in this order
TORCH_BACKPLANE_VISIBLE_DEVICES=host:1,host:0  use only these devices, in this order; "host" means all devices of host
TORCH_BACKPLANE_DISCRETE=1                     hide host-accessible memory of devices from the CPU
TORCH_BACKPLANE_TARGET=nvidia-ada              devices that run kernels get this target (modelled_devices.py)
TORCH_BACKPLANE_SANITIZE_KERNELS=1             use only the device of the kernel sanitizer (../sanitizer/)
"""

from __future__ import annotations

import functools
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_backplane import _C
from torch_backplane.drivers import diagnosis
from torch_backplane.drivers.base import KINDS, Device, DeviceProperties, Driver, Finding, NativeDevice, SettingError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "torch_backplane.drivers"
MOST_DEVICES = 64  # of all drivers together: the size of the runtime's tables

_lock = threading.RLock()
_running = False
_with_kernels: list[int] = []
_failures: dict[str, str] = {}
_asked: dict[str, Driver] = {}  # the drivers whose devices() discovery has called
_counts: dict[str, int] = {}  # the number of devices of each driver that did not fail
_devices: list[Device | NativeDevice] = []
_warned: set[str] = set()


class Found(NamedTuple):
    """A device that a driver listed and discovery accepted."""

    device: Device | NativeDevice
    properties: Any  # _C.DeviceProperties
    rank: tuple[int, int, str]  # sort key of the default order


def available() -> dict[str, EntryPoint]:
    """Return the entry points of the installed drivers by name, without importing them.

    If several packages claim a name, all of them are skipped with a warning. Backplane's own drivers keep their names.
    """
    from importlib.metadata import entry_points  # slow to import, and not needed before bp is used

    claims: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        claims.setdefault(point.name, {})[point.value] = point  # one package may be on sys.path twice
    found = {}
    for name, points in sorted(claims.items()):
        ours = [point for value, point in points.items() if value.startswith("torch_backplane.")]
        if len(points) == 1:
            found[name] = next(iter(points.values()))
        elif ours:
            found[name] = ours[0]
            _warn_once(f"driver {name!r} is {ours[0].value}; other packages that claim the name are ignored")
        else:
            _skip(name, f"several packages claim the name: {', '.join(sorted(points))}")
    return found


def failures() -> dict[str, str]:
    """Return the reason for each skipped driver, by driver name."""
    return dict(_failures)


def findings() -> dict[str, tuple[Finding, ...]]:
    """Return what each installed driver looked for, by driver name. Can take seconds at the first call.

    Raises:
        SettingError: see `discover`.
    """
    discover()
    return {name: _findings(name) for name in sorted({*available(), *_failures, *_asked})}


def reasons() -> dict[str, str]:
    """Return why drivers have no devices, by driver name. Drivers that the user has excluded are not in the result."""
    discover()
    return {name: _reason(name) for name in sorted({*_counts, *_failures}) if not _counts.get(name)}


def no_device_message() -> str:
    """Return the text of the error that there is no device, with the reason for each installed driver."""
    parts = [f"{name}: {diagnosis.reason(found)}" for name, found in findings().items()]
    return (
        f"no bp device is available. {'; '.join(parts) or 'No driver is installed'}. "
        "`python -m torch_backplane doctor` shows what was searched, and what to do"
    )


def with_kernels() -> list[int]:
    """Return the indices of the discovered devices that run kernels."""
    return list(_with_kernels)


def device(index: int) -> Device | NativeDevice:
    """Return the driver's object for the device bp:`index`."""
    discover()
    return _devices[index]


def discover() -> None:
    """Get the devices of all drivers and add them to the runtime. Does nothing after the first call.

    A driver that fails is skipped with a warning.

    Raises:
        SettingError: an environment variable is malformed, or names a driver or device that does not exist.
    """
    global _running
    with _lock:
        if _C.is_discovered():
            return
        if _running:
            raise RuntimeError("a driver used bp devices during discovery; its module and devices() must not")
        _running = True
        try:
            # The sanitizer finds memory by the allocator's addresses, so they must not be translated.
            discrete = not sanitizes_kernels() and (
                switch("TORCH_BACKPLANE_DISCRETE") or bool(os.environ.get("TORCH_BACKPLANE_TARGET"))
            )
            chosen = choose_devices()
            if len(chosen) > MOST_DEVICES:
                raise SettingError(
                    f"{len(chosen)} bp devices were found; at most {MOST_DEVICES} are supported: "
                    "select some with TORCH_BACKPLANE_VISIBLE_DEVICES"
                )
            for device, properties, _ in chosen:
                if isinstance(device, NativeDevice):
                    device.add(properties, discrete)
                else:
                    _C.add_driver_device(device, properties, discrete)
                _devices.append(device)
            _with_kernels[:] = [index for index, found in enumerate(chosen) if found.properties.dialect]
            _C.finish_discovery()
        finally:
            _running = False


def choose_devices() -> list[Found]:
    """Return the devices to use, in the order of their indices."""
    if sanitizes_kernels():
        from importlib.metadata import EntryPoint

        point = EntryPoint("sanitizer", "torch_backplane.sanitizer:SanitizerDriver", ENTRY_POINT_GROUP)
        return ask_drivers({point.name: point}, [point.name]).get(point.name, [])
    installed = available()
    text = os.environ.get("TORCH_BACKPLANE_VISIBLE_DEVICES")
    if text is None:
        found = ask_drivers(installed, selected_drivers(installed))
        devices = [item for devices in found.values() for item in devices]
        ordered_by_user = "TORCH_BACKPLANE_DRIVERS" in os.environ
        if ordered_by_user:
            for name, listed in found.items():
                _warn_if_empty(name, listed, "TORCH_BACKPLANE_DRIVERS")
        return devices if ordered_by_user else sorted(devices, key=lambda device: device.rank)
    visible = parse_visible_devices(text)
    names = selected_drivers(installed)
    for name, _ in visible:
        if name not in names:
            raise SettingError(
                f"TORCH_BACKPLANE_VISIBLE_DEVICES={text!r} names the driver {name!r}; "
                f"available drivers: {', '.join(names) or 'none'}"
            )
    found = ask_drivers(installed, dict.fromkeys(name for name, _ in visible))
    chosen: list[Found] = []
    for name, index in visible:
        if name not in found:
            raise SettingError(
                f"TORCH_BACKPLANE_VISIBLE_DEVICES={text!r} names the driver {name!r}, which failed: {_failures[name]}"
            )
        devices = found[name]
        if index is not None and index >= len(devices):
            named = f"TORCH_BACKPLANE_VISIBLE_DEVICES={text!r} names {name}:{index}; driver {name!r} has "
            if not devices:
                raise SettingError(f"{named}no devices. {_reason(name)}")
            raise SettingError(
                f"{named}{len(devices)} device{'' if len(devices) == 1 else 's'}, counted from {name}:0"
            )
        _warn_if_empty(name, devices, "TORCH_BACKPLANE_VISIBLE_DEVICES")
        chosen += devices if index is None else [devices[index]]
    return chosen


def selected_drivers(installed: dict[str, EntryPoint]) -> list[str]:
    """Return the driver names in TORCH_BACKPLANE_DRIVERS, in that order; all installed drivers if it is not set."""
    text = os.environ.get("TORCH_BACKPLANE_DRIVERS")
    if text is None:
        return list(installed)
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in installed]
    if unknown or not names:
        raise SettingError(
            f"TORCH_BACKPLANE_DRIVERS={text!r} names {', '.join(map(repr, unknown)) or 'no driver'}; "
            f"installed drivers: {', '.join(installed) or 'none'}"
        )
    return names


def parse_visible_devices(text: str) -> list[tuple[str, int | None]]:
    """Return (driver, index) for each entry of TORCH_BACKPLANE_VISIBLE_DEVICES. None: all devices of the driver."""
    visible: list[tuple[str, int | None]] = []
    for entry in text.split(",") if text.strip() else []:
        match = re.fullmatch(r"\s*([^\s:,]+)(?::(\d+))?\s*", entry)
        if match is None:
            raise SettingError(
                f"TORCH_BACKPLANE_VISIBLE_DEVICES={text!r} has the entry {entry!r}; "
                "write driver:index or driver, separated by commas, such as host:1,host:0"
            )
        visible.append((match[1], None if match[2] is None else int(match[2])))
    for name, index in visible:
        if [other for other, _ in visible].count(name) > 1 and (index is None or visible.count((name, index)) > 1):
            entry = name if index is None else f"{name}:{index}"
            raise SettingError(f"TORCH_BACKPLANE_VISIBLE_DEVICES={text!r} names devices of {entry!r} more than once")
    return visible


def ask_drivers(installed: dict[str, EntryPoint], names: Iterable[str]) -> dict[str, list[Found]]:
    """Return the devices of each driver. Drivers that fail are skipped with a warning and are not in the result."""
    from torch_backplane.drivers.checks import checked_properties

    take_for: Callable[[DeviceProperties], DeviceProperties] | None = None
    if os.environ.get("TORCH_BACKPLANE_TARGET"):
        from torch_backplane.drivers import modelled_devices  # imports the kernel generator

        take_for = functools.partial(modelled_devices.properties_as, modelled_devices.chosen())
    found: dict[str, list[Found]] = {}
    for name in names:
        try:
            cls = installed[name].load()
            if not (isinstance(cls, type) and issubclass(cls, Driver)):
                raise TypeError(f"{installed[name].value} is not a subclass of torch_backplane.drivers.Driver")
            driver = _asked[name] = cls()
            listed = driver.devices()
            if take_for is not None:
                for device in listed:
                    device.properties = take_for(device.properties)
            checked = [(device, checked_properties(name, device)) for device in listed]
            found[name] = [
                Found(device, properties, (-cls.priority, KINDS.index(device.properties.kind), name))
                for device, properties in checked
            ]
            _counts[name] = len(checked)
        except SettingError:
            raise
        except Exception as error:
            _skip(name, f"{type(error).__name__}: {error}")
    return found


def switch(variable: str) -> bool:
    """Return whether an environment variable is 1. The default is 0.

    Raises:
        SettingError: it is neither 0 nor 1.
    """
    text = os.environ.get(variable, "0").strip()
    if text not in ("", "0", "1"):
        raise SettingError(f"{variable}={text!r} is neither 0 nor 1")
    return text == "1"


def sanitizes_kernels() -> bool:
    """Return whether TORCH_BACKPLANE_SANITIZE_KERNELS is 1: the kernel sanitizer's device is then the only one."""
    return switch("TORCH_BACKPLANE_SANITIZE_KERNELS")


@functools.cache  # a driver is asked once
def _findings(name: str) -> tuple[Finding, ...]:
    if name in _asked or name in _failures:
        return tuple(diagnosis.examine(_asked.get(name), _failures.get(name)))
    if sanitizes_kernels():
        variable = "TORCH_BACKPLANE_SANITIZE_KERNELS"
    elif name not in selected_drivers(available()):
        variable = "TORCH_BACKPLANE_DRIVERS"
    else:
        variable = "TORCH_BACKPLANE_VISIBLE_DEVICES"
    return (Finding("settings", False, f"{variable}={os.environ[variable]!r} excludes it", f"unset {variable}"),)


def _reason(name: str) -> str:
    return diagnosis.reason(_findings(name))


def _warn_if_empty(name: str, devices: list[Found], variable: str) -> None:
    """Warn if a driver that the user has named has no devices. Other drivers may have none without a warning."""
    if not devices:
        _warn_once(f"{variable} names the driver {name!r}, which has no devices. {_reason(name)}")


def _skip(name: str, reason: str) -> None:
    _failures[name] = reason
    _warn_once(f"driver {name!r} is skipped: {reason}")


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"torch_backplane: {message}", stacklevel=3)
