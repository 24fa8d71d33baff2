"""A device in host memory whose launches the interpreter runs, and observer.h checks access by access.

What a launch may touch is the memory that its tensors' storages asked for, not what the allocator made of it: so the
allocator's cache is switched off, and it is asked how large a segment's one block was meant to be.
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
from torch_backplane.sanitizer.findings import Finding, KernelSanitizerError, RawFinding, in_words

LANGUAGE = OpenCLC()

_ALL_POOLS = (0, 0)
TOTAL_MEMORY = 8 << 30
# As PoCL has it for processors, in what text depends on.
TARGET = Target.of_kind(
    "cpu", max_group_size=4096, group_multiple=8, local_memory=1 << 20, compute_units=4, cache_bytes=32 << 20
)


class Extent(ctypes.Structure):
    """Memory that was asked for, as observer.h has it."""

    _fields_: ClassVar = integers("begin", "bytes", "fixed")


Resolve = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(Extent))


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


@functools.cache
def interpreter() -> Interpreter:
    """With the sanitizer's observer, built and loaded when it is first asked for."""
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
    """Launches that were checked in this process, and accesses to device memory in them, a vector's as one."""
    count = interpreter().functions.sanitizer_count
    return count(0), count(1)


def take() -> list[Finding]:
    """What was found since this was last asked."""
    functions = interpreter().functions
    count = functions.sanitizer_take(None, 0)
    raw = (RawFinding * (count + 64))()
    count = min(functions.sanitizer_take(raw, len(raw)), len(raw))
    return [in_words(one, interpreter().kernel(one.kernel)) for one in raw[:count]]


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Launches within raise nothing of what they find: `take` has it."""
    interpreter().functions.sanitizer_configure(_RESOLVE, 0)
    try:
        yield
    finally:
        interpreter().functions.sanitizer_configure(_RESOLVE, 1)


class SanitizerDevice(InterpreterDevice):
    """Its kernels are written in OpenCL C, word for word what an OpenCL device of its target gets."""

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
        self.interpreter.functions.sanitizer_configure(_RESOLVE, 1)

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
