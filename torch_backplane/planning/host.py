"""Host callbacks that planners submit: PyTorch's CPU kernels, and functions of C libraries.

Both run in stream order, directly on device memory, without copies, and are part of the plan. The host must be able to
access the device's memory, as it can for CPUs through OpenCL. `TORCH_BACKPLANE_DISCRETE=1` disables this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from torch_backplane import _C
from torch_backplane.planning import runtime
from torch_backplane.planning.queue_functions import address_of


def host_sees_memory(device: torch.device) -> bool:
    """Whether the host can access the device's memory: required by `call_on_cpu` and `LibraryFunction`."""
    return _C.host_sees_memory(device.index)


def call_on_cpu(overload: OpOverload, *arguments: Any, **named: Any) -> None:
    """Runs PyTorch's CPU kernel of an `out=` or in-place overload on bp tensors, in stream order.

    Tensors to write to must have the right size, as they cannot be resized. An error of the kernel is raised by the
    next synchronization of the stream.

    Args:
        overload: the overload.
        arguments, named: its arguments: bp tensors of one device, `Number`s, lists of these, and plain values.

    Raises:
        TypeError: an argument is missing or unknown, a tensor is on another device, or no argument is a tensor.
        ValueError: the overload writes to none of its arguments.
        RuntimeError: the host cannot access the device's memory.
    """
    schema = overload._schema
    values = []
    given = list(arguments)
    for argument in schema.arguments:
        if given and not argument.kwarg_only:
            values.append(given.pop(0))
        elif argument.name in named:
            values.append(named.pop(argument.name))
        elif argument.has_default_value():
            values.append(argument.default_value)
        else:
            raise TypeError(f"{overload} is missing the argument {argument.name!r}")
    if given or named:
        raise TypeError(f"{overload} got unexpected arguments: {', '.join(named) or f'{len(given)} positional'}")
    runtime.call_on_cpu(schema.name + (f".{schema.overload_name}" if schema.overload_name else ""), values)


class LibraryFunction:
    """A function of a C library that planners call as `function(*arguments)`.

    All parameters must be integers or pointers, as in the Fortran interfaces of BLAS and LAPACK, which take numbers by
    reference. The return value is ignored.

    Args:
        name: the function's name, for messages.
        address: the function's address in a library that stays loaded, or a function of a `ctypes.CDLL`, which is kept
            alive as long as a plan calls it.
        parameters: for each parameter `torch.Tensor` (a pointer to the tensor's first element; any dtype and strides),
            a dtype (a pointer to a number of that dtype), or `int` (an integer by value).

    Raises:
        TypeError: a parameter is none of these, or `address` is not an address.
        ValueError: the address is null, or there are more than 20 parameters.
    """

    def __init__(self, name: str, address: Any, *parameters: Any) -> None:
        described = [_parameter(name, one) for one in parameters]
        self._function = _C.LibraryFunction(name, address_of(name, address), address, described)

    def __call__(self, *arguments: Any) -> None:
        """Submits a call to the current stream.

        Args:
            arguments: a bp tensor or a number (of Python or a `Number`) for each parameter.

        Raises:
            TypeError: a `torch.Tensor` parameter got something other than a bp tensor, or no argument is a tensor.
            ValueError: the number of arguments is wrong, or the tensors are on several devices.
            RuntimeError: the host cannot access the device's memory.
        """
        runtime.call_library(self._function, arguments)


def _parameter(name: str, described: Any) -> tuple[str, torch.dtype | None]:
    if described is torch.Tensor:
        return "memory", None
    if described is int:
        return "value", torch.int64
    if isinstance(described, torch.dtype):
        return "reference", described
    raise TypeError(f"a parameter of {name} must be torch.Tensor, a dtype or int, but got {described!r}")
