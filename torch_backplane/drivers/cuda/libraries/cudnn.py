"""cuDNN, NVIDIA's convolutions, if it is installed (`pip install nvidia-cudnn-cu13`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from torch_backplane import _C
from torch_backplane.drivers.cuda.libraries.loading import Product, check, meaning
from torch_backplane.drivers.libraries import FAMILIES, Library, Routine

PRODUCT = Product(
    name="cuDNN",
    file="cudnn",
    variable="TORCH_BACKPLANE_CUDNN_LIBRARY",
    package="nvidia-cudnn-cu13",
    functions=_C.cudnn_functions(),
    oldest=(9, 0),
    instead="generated kernels compute convolutions",
)

_STATUSES = {
    1001: "CUDNN_STATUS_NOT_INITIALIZED: cuDNN could not use the device",
    1002: "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH: the files of cuDNN are of different versions",
    1008: "CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED: a file of cuDNN, or a library that it needs, is missing",
    2000: "CUDNN_STATUS_BAD_PARAM: an unsupported argument",
    2006: "CUDNN_STATUS_BAD_PARAM_SIZE_INSUFFICIENT: the workspace is too small",
    3000: "CUDNN_STATUS_NOT_SUPPORTED: no engine supports this call",
    3005: "CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER: NVIDIA's driver is too old",
    3007: "CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH: the GPU is not supported",
    4000: "CUDNN_STATUS_INTERNAL_ERROR",
    4003: "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED: not enough host memory",
    4004: "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED: not enough memory for cuDNN",
    5000: "CUDNN_STATUS_EXECUTION_FAILED: a kernel could not be launched",
    5001: "CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER: a kernel could not be launched",
}
_NOT_SUPPORTED = range(3000, 4000)  # of what was asked for, or on this GPU: generated kernels compute it

_explain = partial(meaning, _STATUSES, "cudnn_graph.h")


def library(functions: Mapping[str, int], index: int, capability: tuple[int, int]) -> Library:
    """Return cuDNN for a device.

    Args:
        functions: the addresses of the functions of PRODUCT.
        index: the device's number in CUDA.
        capability: its compute capability.
    """
    found = {getattr(torch, name): address for name, address in _C.cudnn_convolutions(dict(functions), index).items()}
    routine = Routine(
        addresses=found,
        guard=partial(_guard, index),
        workspace=partial(_workspace, index),
        tf32=capability >= (8, 0),
    )
    return Library(name=PRODUCT.name, routines={"convolution": routine}, explain=_explain)


def _guard(index: int, dtype: torch.dtype, **integers: int) -> str | None:
    status, _ = _query(index, dtype, integers)
    return f"has no engine for this convolution (status {status})" if status in _NOT_SUPPORTED else None


def _workspace(index: int, dtype: torch.dtype, **integers: int) -> int:
    """Bytes of the workspace. Only a plan of cuDNN tells, so the runtime has a plan for each size, too."""
    status, nbytes = _query(index, dtype, integers)
    check(f"{PRODUCT.name} convolution", status, _explain)
    return nbytes


def _query(index: int, dtype: torch.dtype, integers: Mapping[str, int]) -> tuple[int, int]:
    given = [int(integers[name]) for name in FAMILIES["convolution"].integers]
    return _C.cudnn_workspace(index, str(dtype).removeprefix("torch."), given)
