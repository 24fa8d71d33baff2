"""Kernel libraries for OpenCL devices, if they are installed."""

from __future__ import annotations

from torch_backplane.drivers.libraries import Library
from torch_backplane.drivers.opencl.libraries import clblast, vkfft


def installed(opencl: str, is_processor: bool) -> tuple[Library, ...]:
    """Return the installed libraries for a device.

    Args:
        opencl: the file of a loaded library that contains OpenCL's functions, or is linked with them.
        is_processor: whether the device is a CPU.
    """
    return tuple(filter(None, (clblast.library(), vkfft.library(opencl, is_processor))))
