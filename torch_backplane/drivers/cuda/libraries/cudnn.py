"""cuDNN, NVIDIA's convolutions and attention, if it is installed (`pip install nvidia-cudnn-cu13`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
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
    functions=[*_C.cudnn_functions(), "cudnnGetVersion"],
    oldest=(9, 0),
    instead="generated kernels compute convolutions and attention",
)

# Attention needs tensor cores of compute capability 8.0, and a version without defects of earlier ones (its gradients,
# if the number of keys is not a multiple of 128): 9.15.1, as cudnnGetVersion returns it.
_ATTENTION_CAPABILITY, _ATTENTION_VERSION = (8, 0), 91501
_COLUMNS = 8

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
    def routine(family: str, refuses: _Refuses = lambda dtype, **integers: None) -> Routine:
        found = _C.cudnn_routines(dict(functions), family, index)
        return Routine(
            addresses={getattr(torch, name): address for name, address in found.items()},
            guard=partial(_guard, index, family, refuses),
            workspace=partial(_workspace, index, family),
            tf32=family == "convolution" and capability >= (8, 0),
        )

    routines = {"convolution": routine("convolution")}
    if capability >= _ATTENTION_CAPABILITY and _version(functions) >= _ATTENTION_VERSION:
        routines["attention"] = routine("attention", _refuses_attention)
        routines["attention_backward"] = routine("attention_backward", partial(_refuses_gradients, capability))
    return Library(name=PRODUCT.name, routines=routines, explain=_explain)


_Refuses = Callable[..., str | None]


def _version(functions: Mapping[str, int]) -> int:
    """The version as a number: 91501 for 9.15.1."""
    return ctypes.CFUNCTYPE(ctypes.c_size_t)(functions["cudnnGetVersion"])()


def _refuses_attention(dtype: torch.dtype, **integers: int) -> str | None:
    if integers["columns"] % _COLUMNS or integers["value_columns"] % _COLUMNS:
        return f"takes multiples of {_COLUMNS} columns"
    return None


def _refuses_gradients(capability: tuple[int, int], dtype: torch.dtype, **integers: int) -> str | None:
    """The limits of cudnn-frontend. Those that depend on the GPU are not left to cuDNN's heuristics, as NVIDIA does."""
    most = 256 if capability[0] == 9 else 128
    if integers["columns"] > most or integers["value_columns"] > most:
        return f"computes gradients for up to {most} columns"
    if integers["queries"] == 1 and integers["keys"] == 1:
        return "computes gradients for more than one query and key"
    return _refuses_attention(dtype, **integers)


def _guard(index: int, family: str, refuses: _Refuses, dtype: torch.dtype, **integers: int) -> str | None:
    if (refused := refuses(dtype, **integers)) is not None:
        return refused
    status, _ = _query(index, family, dtype, integers)
    return f"has no engine for this {family} (status {status})" if status in _NOT_SUPPORTED else None


def _workspace(index: int, family: str, dtype: torch.dtype, **integers: int) -> int:
    """Bytes of the workspace. Only a plan of cuDNN tells, so the runtime has a plan for each size, too."""
    status, nbytes = _query(index, family, dtype, integers)
    check(f"{PRODUCT.name} {family}", status, _explain)
    return nbytes


def _query(index: int, family: str, dtype: torch.dtype, integers: Mapping[str, int]) -> tuple[int, int]:
    given = [int(integers[name]) for name in FAMILIES[family].integers]
    return _C.cudnn_workspace(index, family, str(dtype).removeprefix("torch."), given)
