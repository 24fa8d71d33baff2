"""A device in host memory that runs kernels one work item after another, and checks each access.

What a launch may touch is the memory that its tensors' storages asked for, not what the allocator made of it: so the
allocator's cache is switched off, and it is asked how large a segment's one block was meant to be.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Iterator
from typing import Any

from torch_backplane import _C
from torch_backplane.drivers.base import (
    ALL_DTYPES,
    Device,
    DeviceError,
    DeviceProperties,
    Driver,
    NativeLauncher,
    SettingError,
)
from torch_backplane.drivers.sanitizer.findings import BARRIER, OUT_OF_BOUNDS, RACE, Finding, KernelSanitizerError
from torch_backplane.drivers.sanitizer.runtime import (
    CheckedKernel,
    Extent,
    NoCompiler,
    RawFinding,
    Resolve,
    library,
    version,
)
from torch_backplane.drivers.sanitizer.text import checked
from torch_backplane.kernels.target import Target

_VERBS = ("reads", "writes", "swaps")
_KINDS = (OUT_OF_BOUNDS, RACE, RACE, BARRIER, OUT_OF_BOUNDS)
_IN_ARGUMENT, _LOCAL_RACE, _BARRIER, _STRAY = (0, 1), 2, 3, 4

_ALL_POOLS = (0, 0)
TOTAL_MEMORY = 8 << 30
# As PoCL has it for processors, in what text depends on.
TARGET = Target.of_kind(
    "cpu", max_group_size=4096, group_multiple=8, local_memory=1 << 20, compute_units=4, cache_bytes=32 << 20
)

_kernels: dict[int, CheckedKernel] = {}
_numbers = itertools.count(1)
_lock = threading.Lock()


class Segment:
    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes


def _requested(address: int, extent: Any) -> int:
    """Fills in what was asked for around an address; 0 where the allocator does not know the memory."""
    for segment in _C._memory_snapshot(_ALL_POOLS, False)["segments"]:
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            blocks = segment["blocks"]
            for block in blocks:
                if block["address"] <= address < block["address"] + block["size"] and block["requested_size"]:
                    extent[0] = Extent(block["address"], block["requested_size"], len(blocks) == 1)
                    return 1
    return 0


_RESOLVE = Resolve(_requested)


def take() -> list[Finding]:
    """What was found since this was last asked."""
    functions = library().functions
    count = functions.backplane_sanitizer_take(None, 0)
    raw = (RawFinding * (count + 64))()
    count = min(functions.backplane_sanitizer_take(raw, len(raw)), len(raw))
    return [_in_words(one) for one in raw[:count]]


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Launches within raise nothing of what they find: `take` has it."""
    library().functions.backplane_sanitizer_configure(_RESOLVE, 0)
    try:
        yield
    finally:
        library().functions.backplane_sanitizer_configure(_RESOLVE, 1)


def _place(item: int, group: int) -> str:
    return f"work item {item} of group {group}"


def _in_words(raw: RawFinding) -> Finding:
    kernel = _kernels[raw.kernel]
    who = _place(raw.item, raw.group)
    other = f"{_place(raw.other_item, raw.other_group)} {_VERBS[raw.other_access]}"
    argument, index = "", raw.offset
    if raw.kind in _IN_ARGUMENT:
        argument, size = kernel.names[raw.argument], kernel.item_bytes[raw.argument] or 1
        index = raw.offset // size
        if raw.kind == 0:
            has = f"which has {raw.end // size:,} elements of {size} bytes from there on"
            before = f" and {-raw.begin:,} bytes before" if raw.begin else ""
            text = f"{who} {_VERBS[raw.access]} {raw.size} bytes at index {index:,} of {argument}, {has}{before}"
        else:
            text = f"{who} {_VERBS[raw.access]} and {other} index {index:,} of {argument}, and no barrier orders them"
    elif raw.kind == _LOCAL_RACE:
        text = f"{who} {_VERBS[raw.access]} and {other} byte {index:,} of local memory, and no barrier orders them"
    elif raw.kind == _BARRIER:
        text = f"{who} ends, and others of its group wait at a barrier"
    else:
        text = f"{who} {_VERBS[raw.access]} {raw.size} bytes at {index:#x}, which is memory of no argument"
    return Finding(_KINDS[raw.kind], kernel.entry, argument, index, text, raw.count)


class SanitizerDevice(Device):
    """Synchronous. Its kernels are written in OpenCL C, word for word what an OpenCL device of its target gets."""

    def __init__(self) -> None:
        self._library = library()
        self.properties = DeviceProperties(
            name="kernel sanitizer",
            total_memory=TOTAL_MEMORY,
            dtypes=ALL_DTYPES,
            host_accessible=True,
            compute_units=TARGET.compute_units,
            dialect="OpenCL C",
            kind="cpu",
            target=TARGET,
            software=version().splitlines()[0],
        )
        names = ("launch", "copy", "fill", "flush")
        self.native_launcher = NativeLauncher(api="c", functions={one: self._library.address(one) for one in names})
        self._library.functions.backplane_sanitizer_configure(_RESOLVE, 1)

    def allocate(self, nbytes: int) -> Segment:
        address = self._library.functions.backplane_sanitizer_allocate(nbytes)
        if not address:
            raise MemoryError(f"the host has no {nbytes:,} bytes")
        return Segment(address, nbytes)

    def free(self, handle: Segment) -> None:
        self._library.functions.backplane_sanitizer_free(handle.address)

    def address(self, handle: Segment) -> int:
        return handle.address

    def copy_in(self, handle: Segment, offset: int, host_memory: memoryview, stream: object) -> None:
        place = (ctypes.c_char * len(host_memory)).from_address(handle.address + offset)
        memoryview(place).cast("B")[:] = host_memory

    def copy_out(self, handle: Segment, offset: int, host_memory: memoryview, stream: object) -> None:
        place = (ctypes.c_char * len(host_memory)).from_address(handle.address + offset)
        host_memory[:] = memoryview(place).cast("B")

    def compile(self, text: str, entry: str) -> CheckedKernel:
        with _lock:
            number = next(_numbers)
        kernel = CheckedKernel(checked(text, entry), entry, number)
        _kernels[number] = kernel
        return kernel

    def native_kernel(self, kernel: CheckedKernel) -> int:
        return ctypes.addressof(kernel.native)

    def native_stream(self, stream: object) -> int:
        return id(stream)

    def native_segment(self, handle: Segment) -> int:
        return handle.address

    def native_error(self, call: str, status: int) -> Exception:
        found = take() if status == 1 else []
        return KernelSanitizerError(found) if found else DeviceError(f"{call} answered {status}", code=status)


class SanitizerDriver(Driver):
    """One device, instead of all others: TORCH_BACKPLANE_SANITIZE_KERNELS=1."""

    def devices(self) -> list[SanitizerDevice]:
        """The device; the allocator's cache is off from then on.

        Raises:
            SettingError: there is no clang.
        """
        try:
            found = [SanitizerDevice()]
        except NoCompiler as error:
            raise SettingError(f"TORCH_BACKPLANE_SANITIZE_KERNELS=1: {error}") from error
        _C._memory_enable_caching(False)
        return found
