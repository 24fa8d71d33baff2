"""A device that records its kernels. Memory is on the host, and launches do nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

from torch_backplane.drivers import Device, DeviceProperties
from torch_backplane.kernels.modelled import read_target

TARGET = "nvidia-ada"


class RecordedKernel:
    """A kernel, and the largest group size of its launches; 0 before the first launch."""

    def __init__(self, text: str, entry: str) -> None:
        self.text, self.entry, self.group = text, entry, 0


class RecordingDevice(Device):
    """A device with the properties of a target.

    Kernels do not run, so what they would write has the values of new memory. Caching must be off in the allocator, or
    memory has values of earlier tensors.

    Attributes:
        value: new memory is filled with this int64.
        kernels: those that were launched, with the largest group size, by text and entry point.

    Args:
        target: the name or the path of a target file (`kernels/modelled.py`).
        dialect: the name of the dialect in which kernels are written.
    """

    def __init__(self, target: str, dialect: str) -> None:
        modelled = read_target(target)
        self.value = 0
        self.kernels: dict[tuple[str, str], RecordedKernel] = {}
        self._lock = threading.Lock()
        self.properties = DeviceProperties(
            name=modelled.name,
            total_memory=1 << 36,
            compute_units=modelled.target.compute_units,
            dialect=dialect,
            kind="gpu",
            target=modelled.target,
            software="ptxas",
        )

    def allocate(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(self.value.to_bytes(8, "little")) * -(-nbytes // 8))

    def free(self, handle: memoryview) -> None:
        handle.release()

    def copy_in(self, handle: memoryview, offset: int, host_memory: memoryview, stream: object) -> None:
        handle[offset : offset + len(host_memory)] = host_memory

    def copy_out(self, handle: memoryview, offset: int, host_memory: memoryview, stream: object) -> None:
        host_memory[:] = handle[offset : offset + len(host_memory)]

    def compile(self, text: str, entry: str) -> RecordedKernel:
        with self._lock:
            return self.kernels.setdefault((text, entry), RecordedKernel(text, entry))

    def launch(
        self,
        kernel: RecordedKernel,
        items: tuple[int, int, int],
        group: tuple[int, int, int],
        arguments: Sequence[tuple[Any, int] | bytes],
        stream: object,
    ) -> None:
        kernel.group = max(kernel.group, math.prod(group))
