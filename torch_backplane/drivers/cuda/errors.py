"""Errors of CUDA's driver API: their names, what helps, and which of them mean that the device is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cuda

from torch_backplane import _C
from torch_backplane.drivers.base import DeviceError

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

_ADDRESS = (
    "to find the kernel, run with TORCH_BACKPLANE_LAUNCH_BLOCKING=1, or under compute-sanitizer with "
    'TORCH_BACKPLANE_CUDA_OPTIONS="--generate-line-info"'
)

# What helps, by status.
REMEDIES = {
    2: "free memory, or see nvidia-smi for other processes that use the GPU",
    34: "the toolkit's stub of libcuda was loaded: remove it from LD_LIBRARY_PATH",
    46: "another process uses the GPU in exclusive mode: end it, or run nvidia-smi -c DEFAULT",
    100: "check nvidia-smi and CUDA_VISIBLE_DEVICES; in a container: docker run --gpus all",
    101: "check CUDA_VISIBLE_DEVICES",
    201: "another library has destroyed the primary context, for example with cudaDeviceReset",
    209: "the kernel was compiled for another architecture",
    221: "PTX needs the driver's compiler, libnvidia-ptxjitcompiler: reinstall NVIDIA's driver",
    222: "update NVIDIA's driver, or install an NVRTC that is not newer than it",
    700: _ADDRESS,
    701: "the kernel needs more registers or shared memory than a group can have",
    709: "another library has destroyed the primary context, for example with cudaDeviceReset",
    716: _ADDRESS,
    718: _ADDRESS,
    719: _ADDRESS,
    802: "start nvidia-fabricmanager, or wait until the system has finished starting",
    803: "libcuda and the kernel module have different versions: restart the system after an update of the driver",
    804: "remove the forward-compatibility package of the toolkit (cuda-compat)",
}


def describe(status: int) -> str:
    """Return the name, the number and the meaning of a status, and what helps if something is known to."""
    try:
        result = cuda.CUresult(status)
        name, meaning = result.name, _text(cuda.cuGetErrorString(result))
    except ValueError:  # an error that is newer than cuda-bindings
        name, meaning = "CUDA error", "unknown to this version of cuda-bindings"
    remedy = REMEDIES.get(status, "")
    return f"{name} ({status}): {meaning}" + (f"; {remedy}" if remedy else "")


def failed_call(status: int) -> str:
    """Return the name of the function of libcuda that has failed with a status in the native launcher, in this thread.

    Returns "" if that is not known. The next call does not return it again.
    """
    return _C.cuda_failed_call(status).partition("_v")[0]


def error(call: str, status: int) -> DeviceError:
    """Return the exception for a call that returned a status."""
    return DeviceError(f"{call} answered {describe(status)}", code=status, lost=status in LOST)


def checked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of cuda-bindings and return its result, a tuple if it has several.

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
