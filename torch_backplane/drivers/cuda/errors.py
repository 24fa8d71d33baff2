"""Errors of CUDA's driver API, and of HIP: their names, what helps, and which of them mean that the device is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_backplane import _C
from torch_backplane.drivers.base import DeviceError
from torch_backplane.drivers.cuda import platforms
from torch_backplane.drivers.cuda.platforms import driver as cuda

OUT_OF_MEMORY = 2
ALREADY_ACCESSIBLE = 704  # cuCtxEnablePeerAccess was called before
ALREADY_PINNED = 712  # by another library, or for another device
NOT_READY = 600

# After these errors, every call in the context returns the same error.
LOST = frozenset({
    4,  # CUDA is shutting down
    201, 709,  # another library has destroyed or reset the primary context
    214, 220, 226,  # uncorrectable errors of memory and links
    700,  # illegal address
    702,  # a kernel exceeded the time limit of a display
    710,  # a failed assertion in a kernel
    714, 715, 716, 717, 718, 719,  # faults of kernels
    721,  # a leak of tensor memory
    911,  # another device of a multi-device program failed
})  # fmt: skip

def describe(status: int) -> str:
    """Return the name, the number and the meaning of a status, and what helps if something is known to."""
    try:
        result = cuda.CUresult(status)
        name, meaning = result.name, _text(cuda.cuGetErrorString(result))
    except ValueError:  # an error that is newer than cuda-bindings
        name, meaning = "CUDA error", "unknown to this version of cuda-bindings"
    remedy = platforms.chosen().remedies.get(status, "")
    return f"{name} ({status}): {meaning}" + (f"; {remedy}" if remedy else "")


def failed_call(status: int) -> str:
    """Return the name of the function that has failed with a status in the native launcher, in this thread.

    Returns "" if that is not known. The next call does not return it again.
    """
    return _C.cuda_failed_call(status).partition("_v")[0]


def error(call: str, status: int) -> DeviceError:
    """Return the exception for a call, of CUDA's name, that returned a status."""
    name = platforms.chosen().name_of(call)
    return DeviceError(f"{name} answered {describe(status)}", code=status, lost=status in LOST)


def checked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of `platforms.driver` and return its result, a tuple if it has several.

    Raises:
        DeviceError: it returned an error.
    """
    status, *results = function(*arguments)
    if int(status) != 0:
        raise error(function.__name__, int(status))
    return results[0] if len(results) == 1 else tuple(results)


def allocated(function: Callable[..., Any], *arguments: Any) -> Any:
    """Like `checked`, but raises MemoryError if there is not enough memory."""
    try:
        return checked(function, *arguments)
    except DeviceError as failure:
        if failure.code == OUT_OF_MEMORY:
            raise MemoryError(str(failure)) from failure
        raise


def _text(answer: Any) -> str:
    status, text = answer
    return text.decode() if int(status) == 0 and text else "no description"
