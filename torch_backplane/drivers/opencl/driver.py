"""The OpenCL driver, which finds the devices of all platforms. Imports PyOpenCL only at discovery."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_backplane.drivers import kernel_cache
from torch_backplane.drivers.base import KINDS, Driver

if TYPE_CHECKING:
    from torch_backplane.drivers.opencl.device import OpenCLDevice


class OpenCLDriver(Driver):
    """The driver of all OpenCL devices that can run a kernel: GPUs first, then accelerators, then CPUs."""

    def devices(self) -> Sequence[OpenCLDevice]:
        """Return the devices; an empty list, without a warning, if there is no PyOpenCL or no OpenCL platform.

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
    """Return the OpenCL platforms that PyOpenCL (`cl`) finds, or an empty list."""
    try:
        return list(cl.get_platforms())
    except cl.LogicError as error:
        if error.code == cl.status_code.PLATFORM_NOT_FOUND_KHR:
            return []
        raise


def open_devices(platforms: Sequence[Any]) -> list[OpenCLDevice]:
    """Return the usable devices of `platforms`. Warns about each other device, and each broken platform.

    If PoCL is installed twice, by the system and by pip, the OpenCL loader lists both installations. The first PoCL
    platform with a working device is used, so that the processor is not listed twice.
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
