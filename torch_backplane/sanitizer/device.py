"""A device in host memory. The interpreter runs its launches, and observer.h checks every memory access.

A launch may access the bytes that its tensors' storages requested, not the allocator's rounded sizes. Therefore caching
is disabled, so that a segment has one block, and the allocator provides the requested size of that block.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from torch_backplane import _C
from torch_backplane.drivers import DeviceError, DeviceProperties, Driver, SettingError
from torch_backplane.drivers.base import ALL_DTYPES
from torch_backplane.interpreter.device import InterpreterDevice
from torch_backplane.interpreter.language import NoCompiler
from torch_backplane.interpreter.library import Interpreter, integers
from torch_backplane.interpreter.opencl_c import OpenCLC
from torch_backplane.kernels.target import Target
from torch_backplane.sanitizer.findings import Finding, KernelSanitizerError, RawFinding, described

LANGUAGE = OpenCLC()

_ALL_POOLS = (0, 0)
TOTAL_MEMORY = 8 << 30
# The properties that kernel sources depend on are those of PoCL on CPUs.
TARGET = Target.of_kind(
    "cpu", max_group_size=4096, group_multiple=8, local_memory=1 << 20, compute_units=4, cache_bytes=32 << 20
)


class Extent(ctypes.Structure):
    """The requested memory around an address; `Extent` in observer.h."""

    _fields_: ClassVar = integers("begin", "bytes", "fixed")


Resolve = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(Extent))


def _requested(address: int, extent: Any) -> int:
    """Store the requested memory that contains an address in `extent`. Returns 0 if the allocator does not know it."""
    for segment in _C._memory_snapshot(_ALL_POOLS, False)["segments"]:
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            blocks = segment["blocks"]
            for block in blocks:
                if block["address"] <= address < block["address"] + block["size"] and block["requested_size"]:
                    extent[0] = Extent(block["address"], block["requested_size"], len(blocks) == 1)
                    return 1
    return 0


RESOLVE = Resolve(_requested)


@functools.cache
def interpreter() -> Interpreter:
    """Return the interpreter with the sanitizer's observer, compiled and loaded on the first call."""
    which = ctypes.c_uint64
    prototypes = {
        "sanitizer_configure": (None, [Resolve, which]),
        "sanitizer_take": (which, [ctypes.POINTER(RawFinding), which]),
        "sanitizer_count": (which, [which]),
    }
    made = Interpreter("sanitizer", Path(__file__).with_name("observer.h"), LANGUAGE, prototypes)
    assert made.functions.sanitizer_count(2) == ctypes.sizeof(RawFinding)
    return made


def counts() -> tuple[int, int]:
    """Return the numbers of launches checked in this process, and of their accesses to device memory.

    The access of a vector counts as one.
    """
    count = interpreter().functions.sanitizer_count
    return count(0), count(1)


def take() -> list[Finding]:
    """Return the findings since the last call, and forget them."""
    functions = interpreter().functions
    count = functions.sanitizer_take(None, 0)
    raw = (RawFinding * (count + 64))()
    count = min(functions.sanitizer_take(raw, len(raw)), len(raw))
    return [described(one, interpreter().kernel(one.kernel)) for one in raw[:count]]


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Do not raise findings of launches in a `with` block. `take` returns them."""
    interpreter().functions.sanitizer_configure(RESOLVE, 0)
    try:
        yield
    finally:
        interpreter().functions.sanitizer_configure(RESOLVE, 1)


class SanitizerDevice(InterpreterDevice):
    """The sanitizer's device. Its kernel sources are exactly those of an OpenCL device with the same target."""

    def __init__(self) -> None:
        properties = DeviceProperties(
            name="kernel sanitizer",
            total_memory=TOTAL_MEMORY,
            dtypes=ALL_DTYPES,
            address_space="host",
            compute_units=TARGET.compute_units,
            dialect=LANGUAGE.name,
            kind="cpu",
            target=TARGET,
            software=LANGUAGE.version().splitlines()[0],
        )
        super().__init__(interpreter(), properties)
        self.interpreter.functions.sanitizer_configure(RESOLVE, 1)

    def native_error(self, call: str, status: int) -> Exception:
        found = take() if status == 1 else []
        return KernelSanitizerError(found) if found else DeviceError(f"{call} answered {status}", code=status)


class SanitizerDriver(Driver):
    """The driver that replaces all others with TORCH_BACKPLANE_SANITIZE_KERNELS=1. It has one device."""

    def devices(self) -> list[SanitizerDevice]:
        """Return the device, and disable caching in the allocator.

        Raises:
            SettingError: clang is not installed.
        """
        try:
            found = [SanitizerDevice()]
        except NoCompiler as error:
            raise SettingError(f"TORCH_BACKPLANE_SANITIZE_KERNELS=1: {error}") from error
        _C._memory_enable_caching(False)
        return found
