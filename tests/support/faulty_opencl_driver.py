"""A driver for tests: the first OpenCL device twice, with OpenCL calls that fail on request.

`answers[name] = status` makes the function `name` return this status from then on. C names select functions of the
native launcher, for the first device only. PyOpenCL names select PyOpenCL's functions, and also the launcher's
functions that do the same. `counts` counts the launcher's calls of each function.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pyopencl as cl

from torch_backplane.drivers import Driver, NativeLauncher
from torch_backplane.drivers.opencl.device import OpenCLDevice, Stream
from torch_backplane.drivers.opencl.driver import platforms

answers: dict[str, int] = {}
calls: list[str] = []  # names of the functions that failed
counts: Counter[str] = Counter()
streams: list[Stream] = []  # of the first device

_INT, _POINTER = ctypes.c_int, ctypes.c_void_p
_SIGNATURES = {
    "clSetKernelArg": ctypes.CFUNCTYPE(_INT, _POINTER, ctypes.c_uint, ctypes.c_size_t, _POINTER),
    "clEnqueueNDRangeKernel": ctypes.CFUNCTYPE(_INT, *[_POINTER] * 2, ctypes.c_uint, *[_POINTER] * 6),
    "clEnqueueCopyBuffer": ctypes.CFUNCTYPE(
        _INT, *[_POINTER] * 3, *[ctypes.c_size_t] * 3, ctypes.c_uint, *[_POINTER] * 2
    ),
    "clEnqueueFillBuffer": ctypes.CFUNCTYPE(
        _INT, *[_POINTER] * 3, *[ctypes.c_size_t] * 3, ctypes.c_uint, *[_POINTER] * 2
    ),
    "clEnqueueReadBuffer": ctypes.CFUNCTYPE(
        _INT, *[_POINTER] * 2, ctypes.c_uint, *[ctypes.c_size_t] * 2, _POINTER, ctypes.c_uint, *[_POINTER] * 2
    ),
    "clEnqueueWriteBuffer": ctypes.CFUNCTYPE(
        _INT, *[_POINTER] * 2, ctypes.c_uint, *[ctypes.c_size_t] * 2, _POINTER, ctypes.c_uint, *[_POINTER] * 2
    ),
    "clEnqueueMarkerWithWaitList": ctypes.CFUNCTYPE(_INT, _POINTER, ctypes.c_uint, *[_POINTER] * 2),
    "clEnqueueBarrierWithWaitList": ctypes.CFUNCTYPE(_INT, _POINTER, ctypes.c_uint, *[_POINTER] * 2),
    "clWaitForEvents": ctypes.CFUNCTYPE(_INT, ctypes.c_uint, _POINTER),
    "clGetEventInfo": ctypes.CFUNCTYPE(_INT, _POINTER, ctypes.c_uint, ctypes.c_size_t, *[_POINTER] * 2),
    "clGetEventProfilingInfo": ctypes.CFUNCTYPE(_INT, _POINTER, ctypes.c_uint, ctypes.c_size_t, *[_POINTER] * 2),
    "clFlush": ctypes.CFUNCTYPE(_INT, _POINTER),
    "clFinish": ctypes.CFUNCTYPE(_INT, _POINTER),
    "clEnqueueNativeKernel": ctypes.CFUNCTYPE(
        _INT, *[_POINTER] * 3, ctypes.c_size_t, ctypes.c_uint, *[_POINTER] * 2, ctypes.c_uint, *[_POINTER] * 2
    ),
}
# Launcher functions that fail together with a PyOpenCL function: either of the two can be called for an operation.
_SAME = {
    "clEnqueueReadBuffer": "enqueue_copy",
    "clEnqueueWriteBuffer": "enqueue_copy",
    "clEnqueueMarkerWithWaitList": "enqueue_marker",
    "clEnqueueBarrierWithWaitList": "enqueue_barrier",
}
_kept: list[Any] = []  # callbacks must outlive the launcher


class InjectedError(cl.RuntimeError):
    """Imitates PyOpenCL's error, which cannot be constructed in Python."""

    def __init__(self, routine: str, code: int) -> None:
        self._what = (routine, code)

    @property
    def routine(self) -> str:  # type: ignore[override]
        return self._what[0]

    @property
    def code(self) -> int:  # type: ignore[override]
        return self._what[1]

    def __str__(self) -> str:
        return f"{self._what[0]} failed: {self._what[1]}"


def failing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if name in answers:
            calls.append(name)
            raise InjectedError(name, answers[name])
        return function(*arguments, **options)

    return call


for _name in ("enqueue_copy", "enqueue_fill_buffer", "enqueue_marker", "enqueue_barrier", "Buffer", "Kernel"):
    setattr(cl, _name, failing(_name, getattr(cl, _name)))
for _name in ("finish", "flush"):
    setattr(cl.CommandQueue, _name, failing(_name, getattr(cl.CommandQueue, _name)))


def failing_launcher(launcher: NativeLauncher) -> NativeLauncher:
    def replacement(name: str, address: int) -> int:
        if name not in _SIGNATURES:  # for example functions that destructors call
            return address
        signature = _SIGNATURES[name]
        function = signature(address)

        def call(*arguments: Any) -> int:
            counts[name] += 1
            for one in (name, _SAME.get(name)):
                if one in answers:
                    calls.append(one)
                    return answers[one]
            return function(*arguments)

        callback = signature(call)
        _kept.append(callback)
        return ctypes.cast(callback, _POINTER).value or 0

    functions = {name: replacement(name, address) for name, address in launcher.functions.items()}
    return NativeLauncher(api="opencl", functions=functions)


class FaultyDevice(OpenCLDevice):
    def __init__(self, device: cl.Device) -> None:
        super().__init__(device)
        self.native_launcher = failing_launcher(self.native_launcher)

    def create_stream(self, priority: int) -> Stream:
        streams.append(super().create_stream(priority))
        return streams[-1]


class FaultyDriver(Driver):
    def devices(self) -> Sequence[OpenCLDevice]:
        device = platforms(cl)[0].get_devices()[0]
        return [FaultyDevice(device), OpenCLDevice(device)]
