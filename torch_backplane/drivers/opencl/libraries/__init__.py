"""Libraries of kernels for OpenCL devices, each where it is installed."""

from __future__ import annotations

from torch_backplane.drivers.libraries import Library
from torch_backplane.drivers.opencl.libraries import clblast, vkfft


def installed(opencl: str, is_processor: bool) -> tuple[Library, ...]:
    """Those for a device.

    Args:
        opencl: the file of a library that is loaded and has, or is linked with, OpenCL's functions.
        is_processor: the device is the CPU.
    """
    return tuple(filter(None, (clblast.library(), vkfft.library(opencl, is_processor))))
