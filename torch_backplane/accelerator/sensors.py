"""Readings for which torch.cuda uses NVML: memory in use, and those that bp drivers do not report."""

from __future__ import annotations

from typing import NoReturn

from torch_backplane.accelerator._utils import DeviceLike
from torch_backplane.accelerator.memory import mem_get_info


def device_memory_used(device: DeviceLike = None) -> int:
    """Return the bytes of a device's memory that are in use, including cached memory, as its driver reports them."""
    free, total = mem_get_info(device)
    return total - free


def _no_sensor(what: str) -> NoReturn:
    raise NotImplementedError(f"bp drivers do not report a device's {what}")


def temperature(device: DeviceLike = None) -> int:
    """Not supported: raises NotImplementedError, as drivers do not report it."""
    _no_sensor("temperature")


def power_draw(device: DeviceLike = None) -> int:
    """Not supported: raises NotImplementedError, as drivers do not report it."""
    _no_sensor("power draw")


def clock_rate(device: DeviceLike = None) -> int:
    """Not supported: raises NotImplementedError, as drivers do not report it."""
    _no_sensor("clock rate")
