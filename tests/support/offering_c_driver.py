"""A driver for tests: the queued accelerator (queued_c_driver.py) with the optional features that OFFERS lists.

- attributes: launches with attributes; `launched()` returns them
- pointers: device addresses (address space "device")
- host: addresses that the CPU can use (address space "host")
- cuda, cpu: the DLPack device
- adopts: adopts external queues; `foreign_queue()` creates one
- context: a native context
- loads: loads binaries, which are ELF libraries
- resources: reports 32 registers and 1,000 bytes of static shared memory for each kernel
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from dataclasses import replace
from typing import Any

from driver_plain_c_module import address, built
from driver_queued_module import QueuedDevice, Stream, library

from torch_backplane.drivers import Driver, KernelResources, NativeLauncher
from torch_backplane.kernels import Target

OFFERS = os.environ.get("OFFERS", "").split()
LOCAL_MEMORY = 4096
MACHINE = 62  # ELF's e_machine of x86-64

LAUNCHER = """\
#include <stdint.h>
typedef struct { char* memory; uint64_t offset; const void* data; uint64_t bytes; } argument_t;
typedef struct {
  uint64_t items[3], group[3], dynamic_shared_memory, cluster[3], cooperative;
} launch_t;
typedef int launch_function(void*, void*, const uint64_t*, const uint64_t*, const argument_t*, uint64_t);
launch_function* inner;
launch_t last;
uint64_t calls, plain_calls, offsets;

int launch(void* queue, void* kernel, const uint64_t* items, const uint64_t* group, const argument_t* given,
           uint64_t count) {
  ++plain_calls;
  for (uint64_t i = 0; i < count; ++i) offsets += given[i].offset;
  return inner(queue, kernel, items, group, given, count);
}
int launch_with_attributes(void* queue, void* kernel, const launch_t* launch, const argument_t* given, uint64_t count) {
  ++calls;
  last = *launch;
  return inner(queue, kernel, launch->items, launch->group, given, count);
}
"""


class Own:
    launcher: ctypes.CDLL | None = None
    foreign: list[int] = []  # noqa: RUF012


def launched() -> list[int]:
    """Returns the number of launches with attributes, then the fields of the last one's launch_t."""
    assert Own.launcher is not None
    number = [ctypes.c_uint64.in_dll(Own.launcher, "calls").value]
    return number + list((ctypes.c_uint64 * 11).in_dll(Own.launcher, "last"))


def counted(name: str) -> int:
    assert Own.launcher is not None
    return ctypes.c_uint64.in_dll(Own.launcher, name).value


def foreign_queue() -> int:
    Own.foreign.append(Stream().native)
    return Own.foreign[-1]


class Pointers:
    def allocate(self, nbytes: int) -> Any:
        return (ctypes.c_char * nbytes).from_buffer(mmap.mmap(-1, nbytes))

    def address(self, handle: Any) -> int:
        return ctypes.addressof(handle)


class NoSegments:
    def native_segment(self, handle: Any) -> int:
        raise AssertionError("pointers need no segments")


class Adopts:
    def adopt_stream(self, handle: int) -> Stream:
        if handle not in Own.foreign:
            raise ValueError(f"the queue {handle} is not of the context 0xC0")
        stream = Stream.__new__(Stream)
        stream.native, stream.given = handle, ctypes.c_void_p(handle)
        return stream


class Loads:
    def load(self, binary: bytes, entry: str) -> Any:
        machine = int.from_bytes(binary[18:20], "little")
        if machine != MACHINE:
            raise ValueError(f"the binary is for the architecture {machine}, and {self.properties.name} has {MACHINE}")  # type: ignore[attr-defined]
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(binary)
            file.flush()
            return ctypes.CDLL(file.name)[entry]


class Reports:
    def kernel_resources(self, kernel: Any) -> KernelResources:
        return KernelResources(registers=32, static_shared_memory=1000)


MIXINS: dict[str, tuple[type, ...]] = {
    "pointers": (NoSegments, Pointers),
    "host": (Pointers,),
    "adopts": (Adopts,),
    "loads": (Loads,),
    "resources": (Reports,),
}


class OfferingDriver(Driver):
    def devices(self) -> list[QueuedDevice]:
        cls = type("OfferingDevice", (*(one for name in OFFERS for one in MIXINS.get(name, ())), QueuedDevice), {})
        device = cls()
        Own.launcher = built(LAUNCHER)
        ctypes.c_void_p.in_dll(Own.launcher, "inner").value = address(library().launch)
        functions = device.native_launcher.functions | {"launch": address(Own.launcher.launch)}
        if "attributes" in OFFERS:
            functions["launch_with_attributes"] = address(Own.launcher.launch_with_attributes)
        device.native_launcher = NativeLauncher(api="c", functions=functions)
        device.properties = replace(
            device.properties,
            name="Offering accelerator",
            target=Target(simt=False, local_memory=LOCAL_MEMORY, max_argument_bytes=1 << 16),
            address_space="device" if "pointers" in OFFERS else "host" if "host" in OFFERS else "synthetic",
            dlpack_device=(2, 3) if "cuda" in OFFERS else (1, 0) if "cpu" in OFFERS else None,
        )
        if "context" in OFFERS:
            device.native_context = 0xC0
        return [device]
