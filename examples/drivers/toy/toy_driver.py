"""A complete driver: simulated accelerators whose memory the CPU cannot access.

A segment is a bytearray that only this module can access; tensors have addresses that cannot be dereferenced. Operators
run as on an accelerator without kernels: their arguments are copied to the host, PyTorch's CPU kernel runs, and the
results are copied back.

TOY_DEVICES=2 is the number of devices (the default), TOY_MEMORY=64MiB the memory of each.
"""

from __future__ import annotations

import os

import torch

from torch_backplane.drivers import Device, DeviceProperties, Driver
from torch_backplane.drivers.sizes import parse_size

# As on many accelerators, there is no 64-bit floating point.
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class ToyDevice(Device):
    """A synchronous device: each method returns when its work is done, so it does not implement streams and events."""

    def __init__(self, index: int, total_memory: int) -> None:
        self.properties = DeviceProperties(
            name=f"Toy accelerator {index}", total_memory=total_memory, dtypes=DTYPES, capability=(1, 0)
        )

    def allocate(self, nbytes: int) -> bytearray:
        return bytearray(nbytes)

    def free(self, handle: bytearray) -> None:
        handle.clear()  # a later use is an error, as on hardware

    def copy_in(self, handle: bytearray, offset: int, host_memory: memoryview, stream: object) -> None:
        handle[offset : offset + len(host_memory)] = host_memory

    def copy_out(self, handle: bytearray, offset: int, host_memory: memoryview, stream: object) -> None:
        host_memory[:] = handle[offset : offset + len(host_memory)]

    # The other methods are optional. Without them, Backplane copies through the host.

    def copy(
        self,
        dst_handle: bytearray,
        dst_offset: int,
        src_handle: bytearray,
        src_offset: int,
        nbytes: int,
        stream: object,
    ) -> None:
        dst_handle[dst_offset : dst_offset + nbytes] = src_handle[src_offset : src_offset + nbytes]

    def can_access_peer(self, peer: Device) -> bool:
        return isinstance(peer, ToyDevice)

    def copy_from_peer(
        self,
        dst_handle: bytearray,
        dst_offset: int,
        peer: Device,
        src_handle: bytearray,
        src_offset: int,
        nbytes: int,
        stream: object,
    ) -> bool:
        if self.can_access_peer(peer):
            self.copy(dst_handle, dst_offset, src_handle, src_offset, nbytes, stream)
        return self.can_access_peer(peer)

    def fill(self, handle: bytearray, offset: int, nbytes: int, value: int, stream: object) -> None:
        handle[offset : offset + nbytes] = bytes([value]) * nbytes


class ToyDriver(Driver):
    """Provides the toy devices."""

    def devices(self) -> list[ToyDevice]:
        memory = parse_size(os.environ.get("TOY_MEMORY", "64MiB"), "TOY_MEMORY")
        return [ToyDevice(index, memory) for index in range(int(os.environ.get("TOY_DEVICES", "2")))]
