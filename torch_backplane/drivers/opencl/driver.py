"""Finds the OpenCL devices of all platforms. PyOpenCL is imported only when devices are discovered."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_backplane.drivers import kernel_cache
from torch_backplane.drivers.base import KINDS, Driver

if TYPE_CHECKING:
    from torch_backplane.drivers.opencl.device import OpenCLDevice


class OpenCLDriver(Driver):
    """Every OpenCL device that can run a kernel: GPUs first, then accelerators, then CPUs."""

    def devices(self) -> Sequence[OpenCLDevice]:
        """No device, without a word, where PyOpenCL or any OpenCL platform is missing.

        Raises:
            SettingError: TORCH_BACKPLANE_CACHE_SIZE is not a size.
        """
        kernel_cache.size_limit()
        try:
            import pyopencl as cl
        except ModuleNotFoundError as error:
            if error.name != "pyopencl":
                raise
            return []
        return open_devices(platforms(cl))


def platforms(cl: Any) -> list[Any]:
    """The OpenCL platforms that PyOpenCL (`cl`) finds, none if there are none."""
    try:
        return list(cl.get_platforms())
    except cl.LogicError as error:
        if error.code == cl.status_code.PLATFORM_NOT_FOUND_KHR:
            return []
        raise


def open_devices(platforms: Sequence[Any]) -> list[OpenCLDevice]:
    """The devices of `platforms` that can be used. Each other one, and each broken platform, gets a warning.

    Where both the system and pip have installed PoCL, the loader lists both, and the processor is there twice: of
    several PoCL platforms, the first one with a device that works is used.
    """
    from torch_backplane.drivers.opencl.device import OpenCLDevice
    from torch_backplane.drivers.opencl.errors import POCL

    opened: list[OpenCLDevice] = []
    for platform in platforms:
        if platform.name == POCL and any(device.device.platform.name == POCL for device in opened):
            continue
        try:
            devices = platform.get_devices()
        except Exception as error:
            _warn(f"platform {platform.name!r}", error)
            continue
        for device in devices:
            try:
                opened.append(OpenCLDevice(device))
            except Exception as error:
                _warn(f"device {device.name.strip()!r} of platform {platform.name!r}", error)
    return sorted(opened, key=lambda device: KINDS.index(device.properties.kind))


def _warn(what: str, error: Exception) -> None:
    warnings.warn(f"torch_backplane: OpenCL {what} is skipped: {type(error).__name__}: {error}", stacklevel=2)
