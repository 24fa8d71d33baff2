"""A device of the audit for each target: the interpreter runs its launches, and observer.h counts them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch_backplane.audit.model import LOCAL_BANKS, MOST_RECORDS, SAMPLED_GROUPS, SECTOR_BYTES, cache_bytes
from torch_backplane.drivers import DeviceProperties
from torch_backplane.drivers.base import ALL_DTYPES, FLOAT64_DTYPES
from torch_backplane.interpreter.cuda_cpp import CudaCpp
from torch_backplane.interpreter.device import InterpreterDevice
from torch_backplane.interpreter.library import Interpreter, integers
from torch_backplane.kernels.modelled import Modelled

# Which groups of a launch compute.
ALL, SAMPLES, NONE = "all", "those that are looked at", "none"

LANGUAGE = CudaCpp()


class _Settings(ctypes.Structure):
    _fields_: ClassVar = integers(
        "subgroup", "sector", "cache_sectors", "banks", "samples", "most_records", "counts", "computes"
    )


class _Operand(ctypes.Structure):
    _fields_: ClassVar = [("sectors", ctypes.c_double), *integers("first", "last", "samples")]


# Figures of a launch that are as observer.h has them.
_COUNTS = ("group", "groups", "sampled", "chain", "chain_global", "barriers", "divergent")
_SUMS = (
    *("accesses", "local_accesses", "requests", "sectors", "least_sectors"),
    *("local_turns", "least_local_turns"),
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


@functools.cache
def interpreter() -> Interpreter:
    """With the audit's observer; one for all devices, so that each text is built once."""
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
    """From the one that has the address `first` to that which ends at `last` or behind it."""
    return -(-last // SECTOR_BYTES) - first // SECTOR_BYTES


class AuditDevice(InterpreterDevice):
    """Of the size that it likes."""

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
        self.interpreter.functions.audit_set(ctypes.byref(settings))

    @contextmanager
    def watched(self, computes: str = ALL) -> Iterator[Callable[[], list[Launch]]]:
        """Counts the launches within; what is given returns them."""
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
