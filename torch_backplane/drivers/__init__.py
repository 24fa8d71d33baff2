"""Drivers: the driver contract, discovery, and Backplane's own drivers.

`base` is the contract that a driver implements, and `libraries` the part of it for libraries such as BLAS. `discovery`
finds the installed drivers and numbers their devices. `host` and `opencl` are Backplane's own drivers.
`docs/write-a-driver.md` shows how to write a driver, and `docs/driver-contract.md` is the reference.
"""

from __future__ import annotations

from torch_backplane.drivers.base import (
    NATIVE_APIS,
    Device,
    DeviceError,
    DeviceProperties,
    Driver,
    Finding,
    KernelResources,
    LaunchAttributes,
    NativeDevice,
    NativeLauncher,
    SettingError,
    TritonTarget,
)
from torch_backplane.drivers.discovery import (
    ENTRY_POINT_GROUP,
    available,
    device,
    discover,
    failures,
    findings,
    no_device_message,
    reasons,
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
    "Finding",
    "KernelResources",
    "LaunchAttributes",
    "Library",
    "NativeDevice",
    "NativeLauncher",
    "Routine",
    "SettingError",
    "TritonTarget",
    "available",
    "device",
    "discover",
    "failures",
    "findings",
    "no_device_message",
    "reasons",
    "with_kernels",
]
