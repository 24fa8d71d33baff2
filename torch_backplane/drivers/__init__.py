"""Drivers: finding them, asking each for its devices, and numbering the devices.

A driver is a class that follows `torch_backplane.drivers.base.Driver`, found through the entry-point group
`torch_backplane.drivers`. `TORCH_BACKPLANE_DRIVERS=opencl,host` names the drivers to use, in this order.
"""

from __future__ import annotations

import os
import threading
import warnings
from importlib.metadata import EntryPoint, entry_points

from torch_backplane import _C
from torch_backplane.drivers.base import Driver

ENTRY_POINT_GROUP = "torch_backplane.drivers"

_lock = threading.RLock()
_failures: dict[str, str] = {}


def available() -> dict[str, EntryPoint]:
    """The installed drivers by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def failures() -> dict[str, str]:
    """What went wrong, for each driver that was skipped in discovery."""
    return dict(_failures)


def selected() -> list[EntryPoint]:
    """The drivers to ask, in order.

    Raises:
        ValueError: TORCH_BACKPLANE_DRIVERS names a driver that is not installed.
    """
    installed = available()
    named = os.environ.get("TORCH_BACKPLANE_DRIVERS")
    if named is None:
        return [installed[name] for name in sorted(installed)]
    names = [name.strip() for name in named.split(",") if name.strip()]
    unknown = [name for name in names if name not in installed]
    if unknown or not names:
        raise ValueError(
            f"TORCH_BACKPLANE_DRIVERS={named!r} names {', '.join(map(repr, unknown)) or 'no driver'}; "
            f"installed drivers: {', '.join(sorted(installed)) or 'none'}"
        )
    return [installed[name] for name in names]


def discover() -> None:
    """Ask every selected driver for its devices and register them, once per process.

    A driver that fails is skipped with one warning that names it; the others keep working.

    Raises:
        ValueError: an environment variable is malformed.
    """
    with _lock:
        if _C.is_discovered():
            return
        drivers: list[Driver] = []
        for point in selected():
            try:
                driver = point.load()()
                devices = driver.devices()
            except ValueError:
                raise  # a setting of the user's, which must not be ignored
            except Exception as error:
                _failures[point.name] = f"{type(error).__name__}: {error}"
                warnings.warn(
                    f"torch_backplane: driver {point.name!r} is skipped, because it failed: {_failures[point.name]}",
                    stacklevel=2,
                )
                continue
            drivers.append(driver)
            for device in devices:
                device.register()
        _C.finish_discovery()
