"""VkFFT, a library of Fourier transforms for OpenCL, where its Python package is installed (`pip install pyvkfft`)."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
from pathlib import Path

import torch

from torch_backplane import _C
from torch_backplane.drivers.libraries import Library, Routine, Transform

PACKAGE, LIBRARY = "pyvkfft", "_vkfft_opencl.*"
# Its functions' parameters have changed before, and no version of them can be asked for.
YEARS = ("2025",)
FUNCTIONS = ("make_config", "init_app", "fft", "ifft", "free_app", "free_config")
OPENCL_FUNCTIONS = (
    "clGetCommandQueueInfo", "clGetDeviceInfo", "clCreateBuffer", "clCreateSubBuffer", "clEnqueueCopyBuffer",
    "clReleaseMemObject",
)  # fmt: skip

# A processor's OpenCL keeps what all work items of a group have in registers on the stack of a thread, which has 8 MiB,
# or 2 where `ulimit -s` is unlimited. Of VkFFT's kernels on PoCL 3.1 a group took up to 1.0 MB for 128 elements along a
# dimension, 2.9 for 251, 5.3 for 1,024, and 14 for 30,030, with which the process ended.
MOST_ON_PROCESSORS = 128

# Beyond these bytes, counted without the batch, its kernels compute addresses in more than 32 bits.
MOST_BYTES = 2**32 - 1

# Of vkFFT_Structs.h, what can come of a call whose arguments are right; OpenCL's own errors are negative.
_STATUSES = {
    1: "no memory",
    2: "the text of a kernel is too long",
    3001: "a radix that it does not have",
    3002: "a length that it does not have",
    3003: "a length that it does not have for real numbers",
    4001: "no memory for what it needs itself",
    4025: "no memory for what it needs itself",
    4031: "a kernel of its could not be built",
    4039: "a kernel of its could not be launched",
}


class Applications:
    """VkFFT's kernels and memory for each size, batch and stream, `torch.backends.bp.fft_plan_cache`."""

    def size(self) -> int:
        return _C.vkfft_applications()

    def max_size(self) -> int:
        return _C.vkfft_most_applications()

    def set_max_size(self, most: int) -> None:
        _C.vkfft_limit_applications(most)


@functools.cache
def library(opencl: str, is_processor: bool) -> Library | None:
    """None where it is not installed, or in a version that is not known.

    Args:
        opencl: the file of a library that is loaded and has, or is linked with, OpenCL's functions.
        is_processor: the device is the CPU.
    """
    functions = _functions(opencl)
    if functions is None:
        return None
    guard = functools.partial(_guard, MOST_ON_PROCESSORS if is_processor else 2**63 - 1)
    return Library(
        name="VkFFT",
        routines={"fft": Routine(addresses=functions, guard=guard, cache=Applications())},
        explain=lambda status: _STATUSES.get(status, "see vkFFT_Structs.h, or OpenCL's cl.h where it is negative"),
    )


def _guard(
    most: int, dtype: torch.dtype, kind: int, batch: int, outer: int, middle: int, inner: int, **rest: int
) -> str | None:
    """Up to `most` elements along a dimension, and up to MOST_BYTES of the larger one of operand and result."""
    if not all(size <= most for size in (outer, middle, inner)):
        return f"transforms along up to {most} elements"
    values = inner if kind == Transform.COMPLEX else inner // 2 + 1
    if not batch * outer * middle * values * 2 * dtype.itemsize <= MOST_BYTES:
        return f"transforms up to {MOST_BYTES} bytes"
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
    """The package's shared object for OpenCL. The package itself, which imports a lot, is not imported."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
        version = importlib.metadata.version(PACKAGE)
    except (ImportError, ValueError):  # PackageNotFoundError is an ImportError
        return None
    if spec is None or version.partition(".")[0] not in YEARS:
        return None
    folders = (Path(folder) for folder in spec.submodule_search_locations or ())
    return next((file for folder in folders for file in sorted(folder.glob(LIBRARY))), None)
