"""A device of the audit for each target: its memory is the host's, and runtime.cpp runs and counts its launches."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch_backplane.audit.compiler import built, runtime
from torch_backplane.audit.dialect import AuditC
from torch_backplane.audit.model import LOCAL_BANKS, MOST_RECORDS, SAMPLED_GROUPS, SECTOR_BYTES, cache_bytes
from torch_backplane.drivers import Device, DeviceProperties, NativeLauncher
from torch_backplane.drivers.base import ALL_DTYPES, FLOAT64_DTYPES
from torch_backplane.kernels.modelled import Modelled

# Which groups of a launch compute.
ALL, SAMPLES, NONE = "all", "those that are looked at", "none"

_LOCAL_RANGE = """
extern char __start_local_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_local_memory[] __attribute__((weak, visibility("hidden")));
void* backplane_audit_local_memory(int end) { return end ? __stop_local_memory : __start_local_memory; }
"""


def _whole(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_uint64) for name in names]


class _Settings(ctypes.Structure):
    _fields_: ClassVar = _whole(
        "subgroup", "sector", "cache_sectors", "banks", "samples", "most_records", "counts", "computes"
    )


class _Kernel(ctypes.Structure):
    _fields_: ClassVar = _whole("run", "has_barriers", "local_begin", "local_end", "number")


class _Operand(ctypes.Structure):
    _fields_: ClassVar = [("sectors", ctypes.c_double), *_whole("first", "last", "samples")]


# Figures of a launch that are as runtime.cpp has them.
_COUNTS = ("groups", "sampled", "chain", "chain_global", "barriers", "divergent")
_SUMS = (
    *("accesses", "local_accesses", "requests", "sectors", "least_sectors"),
    *("local_turns", "least_local_turns"),
)


class _Summary(ctypes.Structure):
    _fields_: ClassVar = [
        *_whole("kernel", "bytes"),
        ("items", ctypes.c_uint64 * 3),
        ("group", ctypes.c_uint64 * 3),
        *_whole(*_COUNTS),
        *((name, ctypes.c_double) for name in _SUMS),
        *_whole("operands"),
        ("operand", _Operand * 64),
    ]


@dataclass(frozen=True, kw_only=True)
class Operand:
    """Memory that a launch was given: bytes that were moved for it, and from its first to its last that was touched;
    `by_all` says that each of the groups that were looked at did, so that these are the first and last of all groups.
    """

    bytes: float
    extent: int
    by_all: bool


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a launch did; numbers are of all groups, as far as those that were looked at tell.

    Args:
        kernel: its entry point; "copy" and "fill" are the device's own, of `bytes` read and written.
        groups, group: how many, and their work items.
        chain: accesses to memory that one item does one after another, with those of items that it waits for;
            chain_global those of them to device memory.
        divergent: groups with a barrier that some items do not get to.
        sectors, least_sectors: that warps touch at once, and the fewest for as many different bytes.
        local_turns, least_local_turns: that local memory takes for what warps touch at once, and the fewest.
    """

    kernel: str
    groups: int = 0
    group: int = 0
    sampled: int = 0
    chain: int = 0
    chain_global: int = 0
    barriers: int = 0
    divergent: int = 0
    local_bytes: int = 0
    accesses: float = 0
    local_accesses: float = 0
    requests: float = 0
    sectors: float = 0
    least_sectors: float = 0
    local_turns: float = 0
    least_local_turns: float = 0
    operands: tuple[Operand, ...] = ()
    bytes: int = 0


class Kernels:
    """Those that are built, whichever device they are for."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Kernel] = {}
        self._names: list[str] = [""]
        self._local: list[int] = [0]
        self._libraries: list[ctypes.CDLL] = []
        self._lock = threading.Lock()

    def get(self, text: str, entry: str) -> _Kernel:
        key = text, entry
        with self._lock:
            if key in self._known:
                return self._known[key]
        library = built(text + _LOCAL_RANGE)
        local = library.backplane_audit_local_memory
        local.restype = ctypes.c_void_p
        waits = re.search(r"\bBARRIER\b", re.sub(r"^#define BARRIER .*$", "", text, flags=re.MULTILINE)) is not None
        with self._lock:
            kernel = _Kernel(_address(library[entry]), waits, local(0) or 0, local(1) or 0, len(self._names))
            self._names.append(entry)
            self._local.append(kernel.local_end - kernel.local_begin)
            self._libraries.append(library)
            return self._known.setdefault(key, kernel)

    def name(self, number: int) -> str:
        return self._names[number]

    def local_bytes(self, number: int) -> int:
        return self._local[number]


KERNELS = Kernels()


def _sectors(first: int, last: int) -> int:
    """From the one that has the address `first` to that which ends at `last` or behind it."""
    return -(-last // SECTOR_BYTES) - first // SECTOR_BYTES


class Segment:
    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class AuditDevice(Device):
    """Synchronous, and of the size that it likes."""

    def __init__(self, modelled: Modelled) -> None:
        target = modelled.target
        self.modelled = modelled
        self.properties = DeviceProperties(
            name=modelled.name,
            total_memory=1 << 36,
            dtypes=[one for one in ALL_DTYPES if target.float64 or one not in FLOAT64_DTYPES],
            compute_units=target.compute_units,
            dialect=AuditC,
            kind="gpu",
            target=target,
            software="audit",
        )
        library = runtime()
        library.backplane_audit_allocate.restype = ctypes.c_void_p
        library.backplane_audit_allocate.argtypes = [ctypes.c_uint64]
        library.backplane_audit_free.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        library.backplane_audit_count.restype = ctypes.c_uint64
        library.backplane_audit_get.restype = ctypes.POINTER(_Summary)
        library.backplane_audit_get.argtypes = [ctypes.c_uint64]
        library.backplane_audit_sizes.restype = ctypes.c_uint64
        for which, structure in enumerate((_Settings, _Kernel, _Summary)):
            assert library.backplane_audit_sizes(ctypes.c_uint64(which)) == ctypes.sizeof(structure)
        self._library = library
        functions = {name: _address(library[f"backplane_audit_{name}"]) for name in ("launch", "copy", "fill", "flush")}
        self.native_launcher = NativeLauncher(api="c", functions=functions)

    def allocate(self, nbytes: int) -> Segment:
        address = self._library.backplane_audit_allocate(nbytes)
        if not address:
            raise MemoryError(f"the host has no {nbytes:,} bytes")
        return Segment(address, nbytes)

    def free(self, handle: Segment) -> None:
        self._library.backplane_audit_free(handle.address, handle.nbytes)

    def copy_in(self, handle: Segment, offset: int, host_memory: memoryview, stream: object) -> None:
        place = (ctypes.c_char * len(host_memory)).from_address(handle.address + offset)
        memoryview(place).cast("B")[:] = host_memory

    def copy_out(self, handle: Segment, offset: int, host_memory: memoryview, stream: object) -> None:
        place = (ctypes.c_char * len(host_memory)).from_address(handle.address + offset)
        host_memory[:] = memoryview(place).cast("B")

    def compile(self, text: str, entry: str) -> object:
        return KERNELS.get(text, entry)

    def native_kernel(self, kernel: Any) -> int:
        return ctypes.addressof(kernel)

    def native_stream(self, stream: object) -> int:
        return id(stream)

    def native_segment(self, handle: Segment) -> int:
        return handle.address

    # What the audit asks of it.

    def set(self, *, counts: bool, computes: str = ALL) -> None:
        """Whether launches are counted, from now on; and which of their groups compute."""
        target = self.modelled.target
        settings = _Settings(
            # Items of a device that says nothing of warps are taken for those of warps of 32.
            subgroup=target.subgroup_size if target.subgroup_size > 1 else 32,
            sector=SECTOR_BYTES,
            cache_sectors=cache_bytes(target) // SECTOR_BYTES,
            banks=LOCAL_BANKS,
            samples=SAMPLED_GROUPS,
            most_records=MOST_RECORDS,
            counts=counts,
            computes=(ALL, SAMPLES, NONE).index(computes),
        )
        self._library.backplane_audit_set(ctypes.byref(settings))

    @contextmanager
    def watched(self, computes: str = ALL) -> Iterator[Callable[[], list[Launch]]]:
        """Counts the launches within; what is given returns them."""
        found: list[Launch] = []
        self.set(counts=True, computes=computes)
        try:
            yield lambda: found
        finally:
            found += [self._launch(number) for number in range(self._library.backplane_audit_count())]
            self.set(counts=False)

    def _launch(self, number: int) -> Launch:
        one = self._library.backplane_audit_get(number).contents
        if one.kernel == 0:
            return Launch(kernel="copy or fill", bytes=one.bytes)
        operands = tuple(
            Operand(
                bytes=each.sectors * SECTOR_BYTES,
                extent=_sectors(each.first, each.last) * SECTOR_BYTES,
                by_all=each.samples == one.sampled,
            )
            for each in one.operand[: one.operands]
            if each.sectors
        )
        figures = {name: getattr(one, name) for name in (*_COUNTS, *_SUMS)}
        return Launch(
            kernel=KERNELS.name(one.kernel),
            group=one.group[0] * one.group[1] * one.group[2],
            local_bytes=KERNELS.local_bytes(one.kernel),
            operands=operands,
            **figures,
        )
