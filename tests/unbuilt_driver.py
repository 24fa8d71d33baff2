"""A driver for tests: a GPU and a processor whose kernels are neither built nor run, so that calls cost little. What
they are told to run is text that planners wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_backplane.drivers import Device, DeviceProperties, Driver


class UnbuiltDevice(Device):
    def __init__(self, kind: str) -> None:
        self.properties = DeviceProperties(name=f"Unbuilt {kind}", total_memory=1 << 30, dialect="OpenCL C", kind=kind)

    def allocate(self, nbytes: int) -> bytearray:
        return bytearray(nbytes)

    def free(self, handle: bytearray) -> None:
        pass

    def copy_in(self, handle: bytearray, offset: int, host_memory: memoryview, stream: Any) -> None:
        handle[offset : offset + len(host_memory)] = host_memory

    def copy_out(self, handle: bytearray, offset: int, host_memory: memoryview, stream: Any) -> None:
        host_memory[:] = handle[offset : offset + len(host_memory)]

    def compile(self, text: str, entry: str) -> str:
        return entry

    def launch(
        self,
        kernel: str,
        items: tuple[int, int, int],
        group: tuple[int, int, int],
        arguments: Sequence[tuple[Any, int] | bytes],
        stream: Any,
    ) -> None:
        pass


class UnbuiltDriver(Driver):
    def devices(self) -> list[UnbuiltDevice]:
        return [UnbuiltDevice("gpu"), UnbuiltDevice("cpu")]
