"""The audit's devices, one per target. The interpreter runs their launches, and observer.h counts memory accesses."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch_backplane.audit.model import LOCAL_BANKS, MAX_RECORDS, SAMPLED_GROUPS, SECTOR_BYTES, cache_bytes
from torch_backplane.drivers import DeviceProperties
from torch_backplane.drivers.base import ALL_DTYPES, FLOAT64_DTYPES
from torch_backplane.interpreter.cuda_cpp import CudaCpp
from torch_backplane.interpreter.device import InterpreterDevice
from torch_backplane.interpreter.library import Interpreter, integers
from torch_backplane.kernels.modelled import Modelled

# Which groups of a launch compute.
ALL, SAMPLES, NONE = "all", "sampled groups", "none"

LANGUAGE = CudaCpp()


class _Settings(ctypes.Structure):
    _fields_: ClassVar = integers(
        "subgroup", "sector", "cache_sectors", "banks", "samples", "max_records", "counts", "computes"
    )


class _Operand(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_double) for name in ("sectors", "written")),
        *integers("first", "last", "samples"),
    ]


# Fields of a launch that are copied from observer.h's summary.
_COUNTS = ("group", "groups", "sampled", "chain", "chain_global", "barriers", "divergent")
_SUMS = (
    *("accesses", "local_accesses", "requests", "sectors", "min_sectors"),
    *("local_turns", "min_local_turns"),
)


class _Summary(ctypes.Structure):
    _fields_: ClassVar = [
        *integers("kernel", "bytes", *_COUNTS),
        *((name, ctypes.c_double) for name in _SUMS),
        *integers("operands"),
        ("operand", _Operand * 64),
    ]


@dataclass(frozen=True, kw_only=True)
class Operand:
    """An operand of a launch.

    Args:
        bytes: moved from or to it.
        written: those of them that are moved to it.
        extent: bytes from the first sector that was accessed to the last.
        by_all: whether every sampled group accessed it. The extent then holds for all groups.
    """

    bytes: float
    written: float
    extent: int
    by_all: bool


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The counts of a launch. Sums are extrapolated from the sampled groups to all groups.

    Args:
        kernel: its entry point; "copy or fill" for one by the device, of `bytes` read and written.
        groups, group: number of work groups, and of work items in each.
        sampled: number of groups whose accesses were recorded.
        chain: memory accesses that one work item makes one after another, including those of work items that it waits
            for; chain_global is the number of these to device memory.
        divergent: groups with a barrier that some work items do not reach.
        requests: accesses of warps to device memory.
        sectors, min_sectors: sectors that these access, and the minimum for the same bytes.
        local_turns, min_local_turns: cycles of local memory for accesses of warps, and the minimum without bank
            conflicts.
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
    min_sectors: float = 0
    local_turns: float = 0
    min_local_turns: float = 0
    operands: tuple[Operand, ...] = ()
    bytes: int = 0


@functools.cache
def interpreter() -> Interpreter:
    """Return the interpreter with the audit's observer. All devices share it, so that each kernel is compiled once."""
    which = ctypes.c_uint64
    prototypes = {
        "audit_set": (None, [ctypes.POINTER(_Settings)]),
        "audit_count": (which, []),
        "audit_get": (ctypes.POINTER(_Summary), [which]),
        "audit_sizes": (which, [which]),
    }
    made = Interpreter("audit", Path(__file__).with_name("observer.h"), LANGUAGE, prototypes)
    for number, structure in enumerate((_Settings, _Summary)):
        assert made.functions.audit_sizes(number) == ctypes.sizeof(structure)
    return made


def _sectors(first: int, last: int) -> int:
    """Return the number of sectors that contain the bytes in [first, last)."""
    return -(-last // SECTOR_BYTES) - first // SECTOR_BYTES


class AuditDevice(InterpreterDevice):
    """A device with the properties of a target, whose launches are counted."""

    def __init__(self, modelled: Modelled) -> None:
        target = modelled.target
        self.modelled = modelled
        properties = DeviceProperties(
            name=modelled.name,
            total_memory=1 << 36,
            dtypes=[one for one in ALL_DTYPES if target.float64 or one not in FLOAT64_DTYPES],
            compute_units=target.compute_units,
            dialect=LANGUAGE.name,
            kind="gpu",
            target=target,
            software="audit",
        )
        super().__init__(interpreter(), properties)

    # Methods for the audit.

    def set(self, *, counts: bool, computes: str = ALL) -> None:
        """Set whether launches are counted, and which of their groups compute, and forget earlier counts."""
        target = self.modelled.target
        settings = _Settings(
            # For a target without subgroups, warps of 32 are assumed.
            subgroup=target.subgroup_size if target.subgroup_size > 1 else 32,
            sector=SECTOR_BYTES,
            cache_sectors=cache_bytes(target) // SECTOR_BYTES,
            banks=LOCAL_BANKS,
            samples=SAMPLED_GROUPS,
            max_records=MAX_RECORDS,
            counts=counts,
            computes=(ALL, SAMPLES, NONE).index(computes),
        )
        self.interpreter.functions.audit_set(ctypes.byref(settings))

    @contextmanager
    def watched(self, computes: str = ALL) -> Iterator[Callable[[], list[Launch]]]:
        """Count the launches in a `with` block. Yields a function that returns them after the block."""
        found: list[Launch] = []
        self.set(counts=True, computes=computes)
        try:
            yield lambda: found
        finally:
            found += [self._launch(number) for number in range(self.interpreter.functions.audit_count())]
            self.set(counts=False)

    def _launch(self, number: int) -> Launch:
        one = self.interpreter.functions.audit_get(number).contents
        if one.kernel == 0:
            return Launch(kernel="copy or fill", bytes=one.bytes)
        kernel = self.interpreter.kernel(one.kernel)
        operands = tuple(
            Operand(
                bytes=each.sectors * SECTOR_BYTES,
                written=each.written * SECTOR_BYTES,
                extent=_sectors(each.first, each.last) * SECTOR_BYTES,
                by_all=each.samples == one.sampled,
            )
            for each in one.operand[: one.operands]
            if each.sectors
        )
        figures = {name: getattr(one, name) for name in (*_COUNTS, *_SUMS)}
        return Launch(
            kernel=kernel.entry,
            local_bytes=kernel.local_bytes,
            operands=operands,
            **figures,
        )
