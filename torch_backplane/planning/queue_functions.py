"""Library functions that enqueue work on the device's native queue, such as a matrix product.

Unlike host callbacks (`host`), they do not access device memory: they get the native handles of the queue and of the
memory, and return once the work is enqueued. They are called in stream order, in C++, and are part of the plan.
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
    """Returns the API whose queue handles `QueueFunction`s get on this device.

    Returns:
        "opencl", or the driver's name if the driver has its own native launcher. Empty if the driver launches kernels
        in Python: then queue functions cannot be called.
    """
    return _C.queue_api(device.index)


class QueueFunction:
    """A C function that planners call as `function(*arguments)` to enqueue work.

    `docs/write-an-operator.md` describes its C signature and status. It can be called from several threads at the same
    time, on different queues.

    Args:
        name: the name of the library function, for messages and `plans.explain`.
        function: a function of a `ctypes.CDLL` or a C callback, which is kept alive as long as a plan calls it; or the
            address of a function in a library that stays loaded.
        parameters: for each parameter "input" (memory that is only read), "output" (memory that is written, including
            workspaces), or the dtype of a number.
        explain: returns the meaning of a status other than 0, for error messages.

    Raises:
        TypeError: a parameter is none of these, `function` is not a function or an address, or `explain` is not
            callable.
        ValueError: the address is null.
    """

    def __init__(
        self, name: str, function: Any, *parameters: Any, explain: Callable[[int], str] | None = None
    ) -> None:
        if explain is not None and not callable(explain):
            raise TypeError(f"explain of {name} must be a function of a status or None, but got {explain!r}")
        for one in parameters:
            if not isinstance(one, torch.dtype) and one not in ROLES:
                raise TypeError(f'a parameter of {name} must be "input", "output" or a dtype, but got {one!r}')
        address = address_of(name, function)
        self._function = _C.QueueFunction(name, address, function, list(parameters), explain)

    def __call__(self, *arguments: Any) -> None:
        """Calls the function on the queue of the current stream.

        Args:
            arguments: a bp tensor or a number (of Python or a `Number`) for each parameter.

        Raises:
            TypeError: an "input" or "output" parameter got something other than a tensor, or no argument is a tensor.
            ValueError: the number of arguments is wrong, or the tensors are not on one bp device.
            RuntimeError: the device has no `queue_api`.
            torch.AcceleratorError: the function returned a status other than 0. If the call has to wait for a kernel
                that is still being built, the next synchronization of the stream raises the error instead.
        """
        runtime.call_on_queue(self._function, arguments)


def address_of(name: str, function: Any) -> int:
    """Returns the address of a ctypes function, or `function` itself if it is an int. Raises TypeError otherwise."""
    if isinstance(function, (CFuncPtr, ctypes.c_void_p)):
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    if not isinstance(function, int) or isinstance(function, bool):
        raise TypeError(f"{name} must be a ctypes function or its address, but got {function!r}")
    return function
