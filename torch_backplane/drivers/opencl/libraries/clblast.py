"""CLBlast, a library of matrix products for OpenCL, if it is installed (Debian: `apt-get install libclblast1`)."""

from __future__ import annotations

import ctypes
import functools

import torch

from torch_backplane import _C
from torch_backplane.drivers.libraries import Library, Routine, unproven

LIBRARY = "libclblast.so.1"

# Statuses from clblast_c.h that a call with valid arguments can return. OpenCL errors keep their numbers.
_STATUSES = {
    -1024: "not implemented",
    -1011: "the first operand's memory is too small",
    -1010: "the second operand's memory is too small",
    -1009: "the result's memory is too small",
    -2046: "not enough local memory",
    -2044: "the device has no double precision",
    -2041: "no tuning parameters for this device",
    -2039: "an unexpected exception",
    -11: "a kernel of CLBlast could not be built",
    -4: "not enough memory for temporary buffers",
}


@functools.cache
def library() -> Library | None:
    """Return CLBlast, or None if it is not installed.

    Its half-precision products are not used, because they accumulate in half precision.
    """
    try:
        loaded = ctypes.CDLL(LIBRARY)
        names = [f"CLBlast{letter}gemm{form}" for letter in "SD" for form in ("", "StridedBatched")]
        addresses = {name: ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in names}
    except (OSError, AttributeError):  # not installed; older than 1.5
        return None
    found = {getattr(torch, dtype): address for dtype, address in _C.clblast_products(addresses).items()}
    return Library(
        name="CLBlast",
        routines={"matmul": Routine(addresses=found, cost=unproven)},
        explain=lambda status: _STATUSES.get(status, "see OpenCL's cl.h"),
    )
