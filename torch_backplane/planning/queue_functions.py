"""Functions of libraries that planners have give work to the device's queue, such as products of matrices.

Unlike the host's part (`host`), they need not see the device's memory: they are given what its API calls the queue and
the memory, and return when the work is given. They are called in the order of the stream, in C++, and are part of the
plan.
"""

from __future__ import annotations

import ctypes
from _ctypes import CFuncPtr
from collections.abc import Callable
from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.planning import runtime

ROLES = ("input", "output")


def queue_api(device: torch.device) -> str:
    """Whose queues `QueueFunction`s are given on this device: "opencl", or where its driver has a launcher of its own
    the driver's name. Empty where they cannot be called, as kernels are launched by the driver in Python.
    """
    return _C.queue_api(device.index)


class QueueFunction:
    """A function of C, to be called by planners: `function(*arguments)`. What it is given, and what it answers, is in
    `docs/write-an-operator.md`. It may be called in several threads at once, on different queues.

    Args:
        name: of what it calls, for messages and `plans.explain`.
        function: a function of a `ctypes.CDLL`, or a C callback, which is kept as long as a plan calls it; or its
            address, in a library that stays loaded.
        parameters: for each one "input" or "output" (memory that is only read, and memory that is written, such as
            results and what the function needs for itself), or the dtype of a number.
        explain: what a status other than 0 means, in words; for errors.

    Raises:
        TypeError: a parameter is none of these, or `function` or `explain` cannot be called.
        ValueError: there is no address.
    """

    def __init__(
        self, name: str, function: Any, *parameters: Any, explain: Callable[[int], str] | None = None
    ) -> None:
        if explain is not None and not callable(explain):
            raise TypeError(f"explain of {name} is a function of a status, or None, and got {explain!r}")
        for one in parameters:
            if not isinstance(one, torch.dtype) and one not in ROLES:
                raise TypeError(f'a parameter of {name} is "input", "output" or a dtype, and got {one!r}')
        address = address_of(name, function)
        self._function = _C.QueueFunction(name, address, function, list(parameters), explain)

    def __call__(self, *arguments: Any) -> None:
        """Calls the function in the order of the current stream, on bp tensors and numbers (Python's and `Number`s).

        Raises:
            TypeError: memory is no bp tensor, or all arguments are numbers.
            ValueError: another number of arguments, or tensors of several devices.
            RuntimeError: the device has no `queue_api`.
            torch.AcceleratorError: the function has answered with a status other than 0; where a kernel is being built
                that has to run before, the stream's next synchronization raises this.
        """
        runtime.call_on_queue(self._function, arguments)


def address_of(name: str, function: Any) -> int:
    """The address of a function of C, which ctypes may know by its object. TypeError for what is none."""
    if isinstance(function, (CFuncPtr, ctypes.c_void_p)):
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    if not isinstance(function, int) or isinstance(function, bool):
        raise TypeError(f"{name} is a function of ctypes or its address, and got {function!r}")
    return function
