"""What torch.cuda asks NVML and the like: how much memory is in use, and readings that no driver gives."""

from __future__ import annotations

from typing import NoReturn

from torch_backplane.accelerator._utils import DeviceLike
from torch_backplane.accelerator.memory import mem_get_info


def device_memory_used(device: DeviceLike = None) -> int:
    """Bytes of the device's memory that are in use, cached memory included, as its driver tells them."""
    free, total = mem_get_info(device)
    return total - free


def _no_sensor(what: str) -> NoReturn:
    raise NotImplementedError(f"bp drivers cannot tell a device's {what}: the driver contract has no such reading")


def temperature(device: DeviceLike = None) -> int:
    """Raises NotImplementedError: drivers cannot tell."""
    _no_sensor("temperature")


def power_draw(device: DeviceLike = None) -> int:
    """Raises NotImplementedError: drivers cannot tell."""
    _no_sensor("power draw")


def clock_rate(device: DeviceLike = None) -> int:
    """Raises NotImplementedError: drivers cannot tell."""
    _no_sensor("clock rate")
