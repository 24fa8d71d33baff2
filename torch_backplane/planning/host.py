"""What planners have the host do: PyTorch's CPU kernels, and functions of C libraries.

Both run in the order of the stream, on the device's own memory, without copies, and are part of the plan. So they are
for devices whose memory the host sees: CPUs, through OpenCL. `TORCH_BACKPLANE_DISCRETE=1` says that it sees none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from torch_backplane import _C
from torch_backplane.planning import runtime
from torch_backplane.planning.queue_functions import address_of


def host_sees_memory(device: torch.device) -> bool:
    """Whether `call_on_cpu` and `call_library` work on this device."""
    return _C.host_sees_memory(device.index)


def call_on_cpu(overload: OpOverload, *arguments: Any, **named: Any) -> None:
    """Runs PyTorch's CPU kernel of `overload`, which must be an `out=` or in-place form, on bp tensors.

    What it writes to must have the right size: it cannot be resized. What the kernel raises is raised by the stream's
    next synchronization.

    Args:
        arguments, named: as for the overload itself: bp tensors of one device, `Number`s, lists of these, plain values.

    Raises:
        TypeError: an argument is missing or unknown, a tensor is on another device, or there is none.
        ValueError: the overload writes to none of its arguments.
        RuntimeError: the host does not see the memory of the device.
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
            raise TypeError(f"{overload} needs the argument {argument.name!r}")
    if given or named:
        raise TypeError(f"{overload} takes no {', '.join(named) or f'{len(given)} more positional arguments'}")
    runtime.call_on_cpu(schema.name + (f".{schema.overload_name}" if schema.overload_name else ""), values)


class LibraryFunction:
    """A function of a C library, to be called by planners: `function(*arguments)`.

    All that it takes must be passed as integers and pointers are. That is so in the Fortran interfaces of BLAS and
    LAPACK, where numbers come by reference. What it returns is not looked at.

    Args:
        name: of the function, for messages.
        address: of the function, in a library that stays loaded; or a function of a `ctypes.CDLL`, which is kept as
            long as a plan calls it.
        parameters: for each one `torch.Tensor` (a pointer to the tensor's first element; any dtype and strides),
            a dtype (a pointer to a number of that dtype), or `int` (an integer by value).

    Raises:
        TypeError: a parameter is none of these, or the address none.
        ValueError: there is no address, or there are more than 20 parameters.
    """

    def __init__(self, name: str, address: Any, *parameters: Any) -> None:
        described = [_parameter(name, one) for one in parameters]
        self._function = _C.LibraryFunction(name, address_of(name, address), address, described)

    def __call__(self, *arguments: Any) -> None:
        """Calls the function in the order of the current stream, on bp tensors and numbers (Python's and `Number`s).

        Raises:
            TypeError: memory is no bp tensor, or all arguments are numbers.
            ValueError: another number of arguments, or tensors of several devices.
            RuntimeError: the host does not see the memory of the device.
        """
        runtime.call_library(self._function, arguments)


def _parameter(name: str, described: Any) -> tuple[str, torch.dtype | None]:
    if described is torch.Tensor:
        return "memory", None
    if described is int:
        return "value", torch.int64
    if isinstance(described, torch.dtype):
        return "reference", described
    raise TypeError(f"a parameter of {name} is torch.Tensor, a dtype or int, and got {described!r}")
