"""Loads libamdhip64 and libhiprtc, and finds their functions by the names that CUDA's have.

TORCH_BACKPLANE_HIP_LIBRARY      the file of libamdhip64, for example that of an emulator
TORCH_BACKPLANE_HIPRTC_LIBRARY   the file of libhiprtc
"""

from __future__ import annotations

import ctypes
import functools
import os

from torch_backplane import _C
from torch_backplane.drivers.cuda.library import addresses

HIP_VARIABLE = "TORCH_BACKPLANE_HIP_LIBRARY"
HIPRTC_VARIABLE = "TORCH_BACKPLANE_HIPRTC_LIBRARY"

_ENDINGS = ("", ".7", ".6")  # of the files; without a number only if development files are installed
_FOLDERS = ("", "/opt/rocm/lib/")  # "": where the system's loader searches

# HIP's names of functions of CUDA's driver API, where more than the prefix differs. Names are without versions (_v2).
# csrc/drivers/hip/ adapts those whose parameters differ, too; here their names are for messages.
NAMES = {
    "cuDriverGetVersion": "hipRuntimeGetVersion",
    "cuDeviceGetCount": "hipGetDeviceCount",
    "cuDevicePrimaryCtxRetain": "hipSetDevice",
    "cuCtxGetCurrent": "hipGetDevice",
    "cuCtxPushCurrent": "hipSetDevice",
    "cuCtxPopCurrent": "hipSetDevice",
    "cuCtxSynchronize": "hipDeviceSynchronize",
    "cuCtxGetStreamPriorityRange": "hipDeviceGetStreamPriorityRange",
    "cuCtxEnablePeerAccess": "hipDeviceEnablePeerAccess",
    "cuMemAlloc": "hipMalloc",
    "cuMemFree": "hipFree",
    "cuMemHostRegister": "hipHostRegister",
    "cuMemHostUnregister": "hipHostUnregister",
    "cuStreamCreate": "hipStreamCreateWithFlags",
    "cuStreamGetCtx": "hipStreamGetDevice",
    "cuStreamGetCaptureInfo": "hipStreamGetCaptureInfo_v2",
    "cuEventCreate": "hipEventCreateWithFlags",
    "cuLaunchKernel": "hipModuleLaunchKernel",
    "cuLaunchKernelEx": "hipModuleLaunchKernel",
    "cuGraphAddMemcpyNode": "hipGraphAddMemcpyNode1D",
    "cuGraphExecMemcpyNodeSetParams": "hipGraphExecMemcpyNodeSetParams1D",
}


def name_of(name: str) -> str:
    """Return HIP's name of a function of CUDA's driver API. What is no such name is returned as it is."""
    return NAMES.get(name) or (f"hip{name[2:]}" if name.startswith("cu") else name)


class MissingFunction(RuntimeError):
    """libamdhip64 lacks a function."""


@functools.cache
def hip() -> ctypes.CDLL:
    """Load libamdhip64. This initializes nothing.

    Raises:
        OSError: it is not installed or cannot be loaded.
    """
    return _load(HIP_VARIABLE, "libamdhip64.so")


@functools.cache
def hiprtc() -> ctypes.CDLL:
    """Load libhiprtc.

    Raises:
        OSError: it is not installed or cannot be loaded.
    """
    return _load(HIPRTC_VARIABLE, "libhiprtc.so")


def _load(variable: str, name: str) -> ctypes.CDLL:
    chosen = os.environ.get(variable, "").strip()
    if chosen:
        return ctypes.CDLL(chosen)
    for folder in _FOLDERS:
        for ending in _ENDINGS:
            try:
                return ctypes.CDLL(f"{folder}{name}{ending}")
            except OSError:
                continue
    raise OSError(f"{name} is not found, with the endings {', '.join(filter(None, _ENDINGS))} or without")


@functools.cache
def adapted() -> dict[str, int]:
    """Return the addresses of the functions that csrc/drivers/hip/ adapts, by CUDA's name.

    Raises:
        MissingFunction: libamdhip64 lacks a function that they call.
    """
    return _C.hip_adapt(_found(_C.hip_adapted()))


def function(name: str) -> int:
    """Return the address of the function that takes the place of one of CUDA's.

    Raises:
        MissingFunction: libamdhip64 does not have it.
    """
    return adapted()[name] if name in adapted() else _found([name_of(name)])[name_of(name)]


def _found(names: list[str]) -> dict[str, int]:
    found = addresses(hip(), names)
    missing = [name for name in names if name not in found]
    if missing:
        raise MissingFunction(f"has no function {', '.join(missing)}")
    return found
