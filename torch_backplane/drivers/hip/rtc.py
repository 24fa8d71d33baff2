"""The names of cuda.bindings.nvrtc that the CUDA driver uses, for functions of hiprtc."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from functools import partial
from typing import Any

from torch_backplane.drivers.cuda.library import addresses
from torch_backplane.drivers.hip import api, library
from torch_backplane.drivers.hip.calls import Function, Stored


class Result(int):
    """hiprtcResult."""

    @property
    def name(self) -> str:
        """Its name."""
        described = library.hiprtc().hiprtcGetErrorString
        described.restype = c_char_p
        return (described(c_int(self)) or b"").decode(errors="replace")


def _address(name: str) -> int:
    found = addresses(library.hiprtc(), [name])
    if name not in found:
        raise library.MissingFunction(f"libhiprtc has no function {name}")
    return found[name]


def _function(name: str, *parameters: Any) -> Function:
    return Function(name, partial(_address, name), Result, *parameters)


nvrtcCreateProgram = _function(
    "hiprtcCreateProgram", Stored(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p
)
nvrtcCompileProgram = _function("hiprtcCompileProgram", c_void_p, c_int, c_char_p)
nvrtcGetProgramLogSize = _function("hiprtcGetProgramLogSize", c_void_p, Stored(c_size_t))
nvrtcGetProgramLog = _function("hiprtcGetProgramLog", c_void_p, c_char_p)
nvrtcGetCUBINSize = _function("hiprtcGetCodeSize", c_void_p, Stored(c_size_t))
nvrtcGetCUBIN = _function("hiprtcGetCode", c_void_p, c_char_p)
_destroy = _function("hiprtcDestroyProgram", c_void_p)


def nvrtcVersion() -> tuple[Any, ...]:
    """Return the status, and HIP's version: hiprtc's own is 9.0 in all versions of ROCm.

    Raises:
        OSError: libhiprtc cannot be loaded.
    """
    library.hiprtc()
    status, number = api.cuDriverGetVersion()
    return (status, *api.version_of(number))


def nvrtcDestroyProgram(program: int) -> tuple[Any, ...]:
    """Destroy a program."""
    handle = c_void_p(program)
    return _destroy(ctypes.addressof(handle))
