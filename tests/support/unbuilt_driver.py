"""A driver for tests: devices that neither build nor run kernels, so calls are cheap. Compilation and launch raise an
error for kernels that exceed the limits of the device's target.

The devices are a GPU and a CPU. With UNBUILT_TARGETS=small they have small limits instead; with UNBUILT_TARGETS=shipped
they have the targets that Backplane ships.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any

from torch_backplane.drivers import Device, DeviceProperties, Driver
from torch_backplane.kernels import Target
from torch_backplane.kernels.modelled import SHIPPED, read_target

BYTES = {"uchar": 1, "short": 2, "int": 4, "uint": 4, "float": 4, "long": 8, "ulong": 8, "double": 8, "float2": 8}

SMALL = {"max_group_size": 16, "local_memory": 2 << 10, "max_argument_bytes": 512}


class UnbuiltDevice(Device):
    def __init__(self, kind: str, target: Target | None = None) -> None:
        self.properties = DeviceProperties(
            name=f"Unbuilt {kind}", total_memory=1 << 30, dialect="OpenCL C", kind=kind, target=target
        )
        self.target = target or Target.of_kind(kind)

    def allocate(self, nbytes: int) -> bytearray:
        return bytearray(nbytes)

    def free(self, handle: bytearray) -> None:
        pass

    def copy_in(self, handle: bytearray, offset: int, host_memory: memoryview, stream: Any) -> None:
        handle[offset : offset + len(host_memory)] = host_memory

    def copy_out(self, handle: bytearray, offset: int, host_memory: memoryview, stream: Any) -> None:
        host_memory[:] = handle[offset : offset + len(host_memory)]

    def compile(self, text: str, entry: str) -> str:
        assert local_bytes(text) <= self.target.local_memory, text
        return entry

    def launch(
        self,
        kernel: str,
        items: tuple[int, int, int],
        group: tuple[int, int, int],
        arguments: Sequence[tuple[Any, int] | bytes],
        stream: Any,
    ) -> None:
        assert math.prod(group) <= self.target.max_group_size, (kernel, group)
        assert all(count % size == 0 for count, size in zip(items, group, strict=True)), (kernel, items, group)
        passed = sum(len(one) if isinstance(one, bytes) else 16 for one in arguments)
        assert passed <= self.target.max_argument_bytes, (kernel, passed)


def local_bytes(text: str) -> int:
    """Returns the size of the local arrays that an OpenCL C text declares."""
    types = {alias: kind for kind, alias in re.findall(r"^typedef (\w+) (\w+);$", text, re.MULTILINE)}
    constants = {name: int(number) for name, number in re.findall(r"^#define (\w+) (\d+)$", text, re.MULTILINE)}
    declared = re.findall(r"\b(?:local|LOCAL) (\w+) ([^;\n]+);", text)
    found = 0
    for kind, arrays in declared:
        for array in arrays.split(", "):
            sizes = [eval(size, constants) for size in re.findall(r"\[(.*?)\]", array)]
            assert sizes, array
            found += math.prod(sizes) * BYTES[types.get(kind, kind)]
    return found


class UnbuiltDriver(Driver):
    def devices(self) -> list[UnbuiltDevice]:
        if os.environ.get("UNBUILT_TARGETS") == "small":
            without = {**SMALL, "local_memory": 0}
            targets = [("gpu", SMALL), ("cpu", SMALL), ("gpu", without), ("gpu", {"max_group_size": 1})]
            return [UnbuiltDevice(kind, Target.of_kind(kind, **figures)) for kind, figures in targets]
        if os.environ.get("UNBUILT_TARGETS") == "shipped":
            return [UnbuiltDevice("gpu", read_target(name).target) for name in SHIPPED]
        return [UnbuiltDevice("gpu"), UnbuiltDevice("cpu")]
