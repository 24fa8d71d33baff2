"""Drivers: the contract that they follow, and how they are found.

`base` says what a driver implements, `libraries` how it brings libraries for its hardware; `discovery` finds the
installed drivers and numbers their devices. `host` and `opencl` are Backplane's own, each a folder with the same parts.
`docs/write-a-driver.md` shows how to write one.
"""

from __future__ import annotations

from torch_backplane.drivers.base import (
    NATIVE_APIS,
    Device,
    DeviceError,
    DeviceProperties,
    Driver,
    KernelResources,
    LaunchAttributes,
    NativeDevice,
    NativeLauncher,
    SettingError,
)
from torch_backplane.drivers.discovery import (
    ENTRY_POINT_GROUP,
    available,
    device,
    discover,
    failures,
    with_kernels,
)
from torch_backplane.drivers.libraries import Library, Routine

__all__ = [
    "ENTRY_POINT_GROUP",
    "NATIVE_APIS",
    "Device",
    "DeviceError",
    "DeviceProperties",
    "Driver",
    "KernelResources",
    "LaunchAttributes",
    "Library",
    "NativeDevice",
    "NativeLauncher",
    "Routine",
    "SettingError",
    "available",
    "device",
    "discover",
    "failures",
    "with_kernels",
]
