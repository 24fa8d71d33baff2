"""cuFFT, NVIDIA's Fourier transforms, if it is installed (`pip install nvidia-cufft`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from torch_backplane import _C
from torch_backplane.drivers.cuda.libraries.loading import Product, check, meaning
from torch_backplane.drivers.libraries import Library, Routine

PRODUCT = Product(
    name="cuFFT",
    file="cufft",
    variable="TORCH_BACKPLANE_CUFFT_LIBRARY",
    package="nvidia-cufft",
    functions=_C.cufft_functions(),
    cuda={11: 12, 12: 13},
    instead="generated kernels compute Fourier transforms",
)

_STATUSES = {
    1: "CUFFT_INVALID_PLAN: the plan is not valid, or there is no device",
    2: "CUFFT_ALLOC_FAILED: not enough memory for cuFFT",
    3: "CUFFT_INVALID_TYPE: an unsupported dtype",
    4: "CUFFT_INVALID_VALUE: an unsupported argument",
    5: "CUFFT_INTERNAL_ERROR: an operation within cuFFT failed",
    6: "CUFFT_EXEC_FAILED: a kernel could not be launched",
    7: "CUFFT_SETUP_FAILED: cuFFT could not be initialized",
    8: "CUFFT_INVALID_SIZE: an unsupported size",
    9: "CUFFT_UNALIGNED_DATA",
    11: "CUFFT_INVALID_DEVICE: the plan is of another device",
    13: "CUFFT_NO_WORKSPACE: the workspace is too small",
    14: "CUFFT_NOT_IMPLEMENTED: an unsupported transform",
    16: "CUFFT_NOT_SUPPORTED: an unsupported transform",
    17: "CUFFT_MISSING_DEPENDENCY: a library that cuFFT needs is missing",
    18: "CUFFT_NVRTC_FAILURE: a kernel could not be compiled",
    19: "CUFFT_NVJITLINK_FAILURE: a kernel could not be linked",
}

_explain = partial(meaning, _STATUSES, "cufft.h")


class Plans:
    """The cache of cuFFT's plans of a device, one for each kind, size and batch: `torch.backends.bp.fft_plan_cache`.

    Args:
        index: the device's number in CUDA.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def size(self) -> int:
        return _C.cufft_plans(self._index)

    def max_size(self) -> int:
        return _C.cufft_max_plans(self._index)

    def set_max_size(self, most: int) -> None:
        _C.cufft_limit_plans(self._index, most)


def library(functions: Mapping[str, int], index: int, capability: tuple[int, int]) -> Library:
    """Return cuFFT for a device.

    Args:
        functions: the addresses of the functions of PRODUCT.
        index: the device's number in CUDA.
        capability: its compute capability.
    """
    found = {getattr(torch, name): address for name, address in _C.cufft_transforms(dict(functions), index).items()}
    routine = Routine(addresses=found, workspace=partial(_workspace, index), cache=Plans(index))
    return Library(name=PRODUCT.name, routines={"fft": routine}, explain=_explain)


def _workspace(index: int, dtype: torch.dtype, **integers: int) -> int:
    """Bytes of the workspace. Only a plan of cuFFT tells, so the runtime has a plan for each size, too."""
    kind, batch, *sizes = (int(integers[name]) for name in ("kind", "batch", "outer", "middle", "inner"))
    status, nbytes = _C.cufft_workspace(index, str(dtype).removeprefix("torch."), kind, batch, sizes)
    check(f"{PRODUCT.name} fft", status, _explain)
    return nbytes
