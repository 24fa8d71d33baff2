"""Drivers: the contract that they follow, and how they are found.

`base` says what a driver implements, `discovery` finds the installed ones and numbers their devices, `host` is the
driver of devices in host memory. `docs/write-a-driver.md` shows how to write one.
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
    ProductLibrary,
    SettingError,
    TransformLibrary,
)
from torch_backplane.drivers.discovery import (
    ENTRY_POINT_GROUP,
    available,
    device,
    discover,
    failures,
    with_kernels,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "NATIVE_APIS",
    "Device",
    "DeviceError",
    "DeviceProperties",
    "Driver",
    "KernelResources",
    "LaunchAttributes",
    "NativeDevice",
    "NativeLauncher",
    "ProductLibrary",
    "SettingError",
    "TransformLibrary",
    "available",
    "device",
    "discover",
    "failures",
    "with_kernels",
]
