"""An argument of a C launcher or library function: `argument_t` of docs/driver-contract.md."""

from __future__ import annotations

import ctypes


class CArgument(ctypes.Structure):
    """Memory (`memory` and `offset`) if `bytes` is 0, else a number of `bytes` bytes at `data`."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
    ]
