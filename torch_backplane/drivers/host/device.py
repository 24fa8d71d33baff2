"""The device of the host driver."""

from __future__ import annotations

import os
import platform
from typing import Any

from torch_backplane import _C
from torch_backplane.drivers.base import DeviceProperties, NativeDevice


class HostDevice(NativeDevice):
    """A device in host memory, implemented in csrc/drivers/host/host_device.cpp."""

    def __init__(self, total_memory: int) -> None:
        self.properties = DeviceProperties(
            name=processor_name(),
            total_memory=total_memory,
            address_space="host",
            compute_units=os.cpu_count() or 1,
            capability=(1, 0),
            kind="host",
        )

    def add(self, properties: Any, discrete: bool) -> None:
        _C.add_host_device(properties, discrete)


def processor_name() -> str:
    """Return the model name of the processor, for example "AMD EPYC 7B13"."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
            for line in cpuinfo:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
