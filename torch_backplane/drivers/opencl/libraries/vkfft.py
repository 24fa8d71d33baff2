"""VkFFT, a library of Fourier transforms for OpenCL, if its Python package is installed (`pip install pyvkfft`)."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
from pathlib import Path

import torch

from torch_backplane import _C
from torch_backplane.drivers.libraries import Library, Routine, Transform, unproven

PACKAGE, LIBRARY = "pyvkfft", "_vkfft_opencl.*"
# The versions of pyvkfft (year) with known function signatures. The signatures have changed before, and the library has
# no query for their version.
YEARS = ("2025",)
FUNCTIONS = ("make_config", "init_app", "fft", "ifft", "free_app", "free_config")
OPENCL_FUNCTIONS = (
    "clGetCommandQueueInfo", "clGetDeviceInfo", "clCreateBuffer", "clCreateSubBuffer", "clEnqueueCopyBuffer",
    "clReleaseMemObject",
)  # fmt: skip

# On a processor, OpenCL keeps the registers of all work items of a group on the stack of a thread: 8 MiB, or 2 MiB if
# `ulimit -s` is unlimited. On PoCL 3.1, a group of VkFFT's kernels used up to 1.0 MB for 128 elements along a
# dimension, 2.9 MB for 251, 5.3 MB for 1,024, and 14 MB for 30,030, which crashed the process.
MAX_ON_PROCESSORS = 128

# VkFFT only uses 64-bit addresses if the size without the batch exceeds this number of bytes. The guard limits the size
# with the batch, because 32-bit addresses would overflow.
MAX_BYTES = 2**32 - 1

# Statuses from vkFFT_Structs.h that a call with valid arguments can return. OpenCL errors are negative.
_STATUSES = {
    1: "out of host memory",
    2: "the text of a kernel is too long",
    3001: "unsupported radix",
    3002: "unsupported length",
    3003: "unsupported length for real numbers",
    4001: "not enough memory for temporary buffers",
    4025: "not enough memory for temporary buffers",
    4031: "a kernel of VkFFT could not be built",
    4039: "a kernel of VkFFT could not be launched",
}


class Applications:
    """The cache of VkFFT applications, one for each size, batch and stream: `torch.backends.bp.fft_plan_cache`."""

    def size(self) -> int:
        return _C.vkfft_applications()

    def max_size(self) -> int:
        return _C.vkfft_max_applications()

    def set_max_size(self, most: int) -> None:
        _C.vkfft_limit_applications(most)


@functools.cache
def library(opencl: str, is_processor: bool) -> Library | None:
    """Return VkFFT, or None if it is not installed or its version is unknown.

    Args:
        opencl: the file of a loaded library that contains OpenCL's functions, or is linked with them.
        is_processor: whether the device is a CPU.
    """
    functions = _functions(opencl)
    if functions is None:
        return None
    guard = functools.partial(_guard, MAX_ON_PROCESSORS if is_processor else 2**63 - 1)
    return Library(
        name="VkFFT",
        routines={"fft": Routine(addresses=functions, guard=guard, cost=unproven, cache=Applications())},
        explain=lambda status: _STATUSES.get(status, "see vkFFT_Structs.h, or OpenCL's cl.h where it is negative"),
    )


def _guard(
    most: int, dtype: torch.dtype, kind: int, batch: int, outer: int, middle: int, inner: int, **rest: int
) -> str | None:
    """Accept up to `most` elements along a dimension, and up to MAX_BYTES in the larger of operand and result."""
    if not all(size <= most for size in (outer, middle, inner)):
        return f"transforms along up to {most} elements"
    values = inner if kind == Transform.COMPLEX else inner // 2 + 1
    if not batch * outer * middle * values * 2 * dtype.itemsize <= MAX_BYTES:
        return f"transforms up to {MAX_BYTES} bytes"
    return None


@functools.cache
def _functions(opencl: str) -> dict[torch.dtype, int] | None:
    file = _file()
    if file is None:
        return None
    try:
        loaded, loader = ctypes.CDLL(str(file)), ctypes.CDLL(opencl)
        functions = [getattr(loaded, name) for name in FUNCTIONS]
        functions += [getattr(loader, name) for name in OPENCL_FUNCTIONS]
        dimensions = loaded.vkfft_max_fft_dimensions()
    except (OSError, AttributeError):  # built for another system, or without OpenCL
        return None
    names = (*FUNCTIONS, *OPENCL_FUNCTIONS)
    addresses = {name: ctypes.cast(one, ctypes.c_void_p).value or 0 for name, one in zip(names, functions, strict=True)}
    return {getattr(torch, dtype): address for dtype, address in _C.vkfft_transforms(addresses, dimensions).items()}


def _file() -> Path | None:
    """Return the package's shared library for OpenCL, without importing the package, which imports a lot."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
        version = importlib.metadata.version(PACKAGE)
    except (ImportError, ValueError):  # PackageNotFoundError is an ImportError
        return None
    if spec is None or version.partition(".")[0] not in YEARS:
        return None
    folders = (Path(folder) for folder in spec.submodule_search_locations or ())
    return next((file for folder in folders for file in sorted(folder.glob(LIBRARY))), None)
