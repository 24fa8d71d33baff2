"""Readings of a device's sensors, with the names and units of torch.cuda, which reads them with NVML.

A driver reports those that it lists in `Device.sensors`. A `device` argument is a torch.device, a string such as
"bp:1", an index, or None for the current device. All functions raise:

* AssertionError: there is no such device.
* NotImplementedError: its driver does not report the sensor, or the hardware does not have it.
* RuntimeError: the sensor cannot be read, for example because the library that does is not installed.
"""

from __future__ import annotations

from typing import TypeGuard

from torch_backplane import _C, drivers
from torch_backplane.accelerator._utils import DeviceLike
from torch_backplane.accelerator.devices import checked_index
from torch_backplane.drivers import Device, NativeDevice


def temperature(device: DeviceLike = None) -> int:
    """Return a device's temperature in degrees Celsius."""
    return _read("temperature", device)


def power_draw(device: DeviceLike = None) -> int:
    """Return a device's power draw in milliwatts."""
    return _read("power_draw", device)


def clock_rate(device: DeviceLike = None) -> int:
    """Return the clock rate of a device's compute units in megahertz."""
    return _read("clock_rate", device)


def utilization(device: DeviceLike = None) -> int:
    """Return the percentage of the time, over the last sample period, in which kernels ran on a device."""
    return _read("utilization", device)


def memory_usage(device: DeviceLike = None) -> int:
    """Return the percentage of the time, over the last sample period, in which device memory was read or written."""
    return _read("memory_usage", device)


def device_memory_used(device: DeviceLike = None) -> int:
    """Return the bytes of a device's memory that all processes use, including cached memory.

    Without a sensor, this is the difference of the numbers that `torch.bp.mem_get_info` returns.
    """
    index = checked_index(device, "device")
    found = drivers.device(index)
    if _has(found, "device_memory_used"):
        return found.read_sensor("device_memory_used")
    free, total = _C._memory_info(index)
    return total - free


def _has(found: Device | NativeDevice, sensor: str) -> TypeGuard[Device]:
    return isinstance(found, Device) and sensor in found.sensors


def _read(sensor: str, device: DeviceLike) -> int:
    index = checked_index(device, "device")
    found = drivers.device(index)
    if not _has(found, sensor):
        driver = _C.device_properties(index).driver
        raise NotImplementedError(f"bp:{index} does not report its {sensor}: the driver {driver} has no such sensor")
    return found.read_sensor(sensor)
