"""The host driver: devices in host memory.

Operators run PyTorch's CPU kernels on the device's memory, without copies, in the calling thread.

TORCH_BACKPLANE_HOST_DEVICES=4     the number of devices, 1 by default
TORCH_BACKPLANE_HOST_MEMORY=2GiB   the memory limit of each device in a process, all physical memory by default
TORCH_BACKPLANE_HOST_ASYNC=1       each stream executes in its own thread, like a stream of a GPU
TORCH_BACKPLANE_HOST_DELAYS=SEED   the same, and some commands start late, so that a missing wait gives wrong results
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch_backplane import _C
from torch_backplane.drivers.base import Driver, Finding, SettingError
from torch_backplane.drivers.host.device import HostDevice
from torch_backplane.drivers.sizes import parse_size

MOST_DEVICES = 64


class HostDriver(Driver):
    """The driver of host devices. TORCH_BACKPLANE_HOST_DEVICES sets their number."""

    priority = -10  # numbered after hardware

    def devices(self) -> Sequence[HostDevice]:
        if is_asynchronous():
            _C.make_host_devices_asynchronous(delay_seed())
        return [HostDevice(memory_limit()) for _ in range(device_count())]

    def diagnose(self) -> Sequence[Finding]:
        count = device_count()
        if count:
            return [Finding("host devices", True, str(count))]
        variable = "TORCH_BACKPLANE_HOST_DEVICES"
        return [Finding("host devices", False, f"{variable} is 0", f"unset {variable}")]


def device_count() -> int:
    """Return TORCH_BACKPLANE_HOST_DEVICES, 1 by default.

    Raises:
        SettingError: it is not a whole number from 0 to 64.
    """
    text = os.environ.get("TORCH_BACKPLANE_HOST_DEVICES", "1")
    if not text.strip().isdecimal() or int(text) > MOST_DEVICES:
        raise SettingError(f"TORCH_BACKPLANE_HOST_DEVICES={text!r} is not a whole number from 0 to {MOST_DEVICES}")
    return int(text)


def memory_limit() -> int:
    """Return TORCH_BACKPLANE_HOST_MEMORY in bytes, all physical memory by default.

    Raises:
        SettingError: it is not a size such as 512MiB or 2GiB.
    """
    text = os.environ.get("TORCH_BACKPLANE_HOST_MEMORY")
    if text is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return parse_size(text, "TORCH_BACKPLANE_HOST_MEMORY")


def is_asynchronous() -> bool:
    """Return whether TORCH_BACKPLANE_HOST_ASYNC is 1, or TORCH_BACKPLANE_HOST_DELAYS is set.

    Raises:
        SettingError: it is neither 0 nor 1.
    """
    text = os.environ.get("TORCH_BACKPLANE_HOST_ASYNC", "0").strip()
    if text not in ("0", "1"):
        raise SettingError(f"TORCH_BACKPLANE_HOST_ASYNC={text!r} is not one of 0, 1")
    return text == "1" or delay_seed() is not None


def delay_seed() -> int | None:
    """Return TORCH_BACKPLANE_HOST_DELAYS, or None for no delays, the default.

    Raises:
        SettingError: it is not a whole number below 2⁶⁴.
    """
    text = os.environ.get("TORCH_BACKPLANE_HOST_DELAYS", "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) >= 2**64:
        raise SettingError(f"TORCH_BACKPLANE_HOST_DELAYS={text!r} is not a seed: write a whole number below 2**64")
    return int(text)
