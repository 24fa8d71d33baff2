"""Records the kernels that a program launches with OpenCL, and launches them again in a bare C loop (launches.c)."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("launches.c")
KERNEL_FUNCTION_NAME, KERNEL_PROGRAM = 0x1190, 0x1194  # arguments of clGetKernelInfo
SIZES = ctypes.c_size_t * 3


class Unavailable(Exception):
    """The loop is not available; the message gives the reason."""


class _Call(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p), ("queue", ctypes.c_void_p), ("number", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32), ("items", SIZES), ("group", SIZES), ("value", ctypes.c_ubyte * 64),
    )  # fmt: skip


class _Argument(ctypes.Structure):
    _fields_ = (("index", ctypes.c_uint32), ("bytes", ctypes.c_uint32), ("value", ctypes.c_void_p))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("queue", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("arguments", ctypes.POINTER(_Argument)),
        ("set", ctypes.c_uint32), ("dimensions", ctypes.c_uint32), ("items", SIZES), ("group", SIZES),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Launch:
    """A call of clEnqueueNDRangeKernel and the kernel's arguments at that time. Handles are addresses."""

    queue: int
    kernel: int
    dimensions: int
    items: tuple[int, ...]
    group: tuple[int, ...]
    arguments: dict[int, bytes]


def build() -> ctypes.CDLL:
    """Compiles launches.c. Raises Unavailable if there is no C compiler or it fails."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        raise Unavailable("there is no C compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "launches.so")
        command = [compiler, "-O2", "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Unavailable(f"{compiler} could not compile {SOURCE.name}: {done.stderr}")
        return ctypes.CDLL(str(library))  # stays loaded after the file is deleted


class Watch:
    """Records the launches on the process's OpenCL devices until `stop`.

    It must be created before a device is used, because functions of launches.c replace two of OpenCL's functions, which
    they call. After `stop`, they cost one more jump per call.

    Raises:
        Unavailable: there is no C compiler, or no PyOpenCL.
    """

    def __init__(self) -> None:
        self._library = build()
        try:
            from torch_backplane.drivers.opencl import device as opencl_device
        except ImportError as error:
            raise Unavailable(f"OpenCL is not available: {error}") from error
        made = opencl_device.native_launcher
        watched = {
            "clSetKernelArg": self._library.watched_set_kernel_arg,
            "clEnqueueNDRangeKernel": self._library.watched_enqueue_kernel,
        }

        def launcher(*arguments: Any, **options: Any) -> Any:
            found = made(*arguments, **options)
            self._library.forward_to(*(ctypes.c_void_p(found.functions[name]) for name in watched))
            places = {name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in watched.items()}
            return dataclasses.replace(found, functions=found.functions | places)

        opencl_device.native_launcher = launcher  # type: ignore[assignment]
        self._library.watch(1)
        self._library.recorded_calls.restype = ctypes.POINTER(_Call)

    def stop(self) -> None:
        self._library.watch(0)

    def calls(self) -> int:
        """The number of recorded calls, to be passed to `launches`."""
        return len(self._recorded_calls())

    def launches(self, start: int) -> list[Launch]:
        """The launches after the first `start` calls. Raises Unavailable if a call could not be recorded."""
        arguments: dict[int, dict[int, bytes]] = {}
        found = []
        for place, call in enumerate(self._recorded_calls()):
            of_kernel = arguments.setdefault(call.kernel, {})
            if call.queue is None:
                of_kernel[call.number] = bytes(call.value[: call.bytes])
            elif place >= start:
                items, group = (tuple(one[: call.number]) for one in (call.items, call.group))
                found.append(Launch(call.queue, call.kernel, call.number, items, group, dict(of_kernel)))
        return found

    def loop(self, launches: Sequence[Launch], beforehand: bool) -> Loop:
        return Loop(self._library, launches, beforehand)

    def _recorded_calls(self) -> list[Any]:
        count, not_all = ctypes.c_size_t(), ctypes.c_int()
        calls = self._library.recorded_calls(ctypes.byref(count), ctypes.byref(not_all))
        if not_all.value:
            raise Unavailable("a launch had an offset, an event wait list, or an argument that cannot be recorded")
        return calls[: count.value]


class Loop:
    """A callable that repeats the launches, with its own kernel objects of the same functions in the same programs.

    Args:
        beforehand: whether each launch has its own kernel object, whose arguments are set now. Otherwise launches of
            one kernel share an object, and the loop sets the arguments that differ from the previous launch.
    """

    def __init__(self, library: ctypes.CDLL, launches: Sequence[Launch], beforehand: bool) -> None:
        self._library, self._queues = library, {launch.queue for launch in launches}
        self._kept: list[Any] = []
        self.sets = 0  # calls of clSetKernelArg
        own: dict[object, int] = {}
        now: dict[int, dict[int, bytes]] = {}
        chosen = []
        for place, launch in enumerate(launches):
            key = place if beforehand else launch.kernel
            if key not in own:
                own[key] = self._another(launch.kernel)
            chosen.append(own[key])
            now[own[key]] = launch.arguments  # finally those of the last launch
        for kernel, arguments in now.items():
            for index, value in arguments.items():
                self._ask("clSetKernelArg", ctypes.c_void_p(kernel), index, ctypes.c_size_t(len(value)), value)
        self._launches = (_Launch * len(launches))()
        for given, kernel, launch in zip(self._launches, chosen, launches, strict=True):
            before, now[kernel] = now[kernel], launch.arguments
            changed = {index: value for index, value in launch.arguments.items() if before[index] != value}
            self.sets += len(changed)
            given.queue, given.kernel, given.dimensions = launch.queue, kernel, launch.dimensions
            given.arguments, given.set = self._arguments(changed), len(changed)
            given.items[: launch.dimensions], given.group[: launch.dimensions] = launch.items, launch.group

    def __call__(self) -> None:
        status = self._library.give(self._launches, ctypes.c_size_t(len(self._launches)))
        if status != 0:
            raise RuntimeError(f"OpenCL returned {status} in the loop")

    def finish(self) -> None:
        for queue in self._queues:
            self._ask("clFinish", ctypes.c_void_p(queue))

    def _arguments(self, values: dict[int, bytes]) -> Any:
        found = (_Argument * len(values))()
        for one, (index, value) in zip(found, values.items(), strict=True):
            memory = ctypes.create_string_buffer(value, len(value))
            self._kept.append(memory)
            one.index, one.bytes, one.value = index, len(value), ctypes.addressof(memory)
        self._kept.append(found)
        return found

    def _another(self, kernel: int) -> int:
        """Creates a kernel object of the same function in the same program. It is never released."""
        name, program, status = ctypes.create_string_buffer(1024), ctypes.c_void_p(), ctypes.c_int32()
        for what, value in ((KERNEL_FUNCTION_NAME, name), (KERNEL_PROGRAM, program)):
            size = ctypes.c_size_t(ctypes.sizeof(value))
            self._ask("clGetKernelInfo", ctypes.c_void_p(kernel), what, size, ctypes.byref(value), None)
        self._opencl.clCreateKernel.restype = ctypes.c_void_p
        made = self._opencl.clCreateKernel(program, name, ctypes.byref(status))
        if made is None:
            raise RuntimeError(f"clCreateKernel returned {status.value}")
        return made

    def _ask(self, function: str, *arguments: Any) -> None:
        status = getattr(self._opencl, function)(*arguments)
        if status != 0:
            raise RuntimeError(f"{function} returned {status}")

    @cached_property
    def _opencl(self) -> ctypes.CDLL:
        import pyopencl

        return ctypes.CDLL(pyopencl._cl.__file__)  # symbols are also looked up in the libraries that it is linked with
