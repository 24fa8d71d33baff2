"""cuSOLVER, NVIDIA's decompositions and solvers, if it is installed (`pip install nvidia-cusolver`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from torch_backplane import _C
from torch_backplane.drivers.cuda.libraries.loading import Product, check, meaning
from torch_backplane.drivers.libraries import FAMILIES, Library, Routine

PRODUCT = Product(
    name="cuSOLVER",
    file="cusolver",
    variable="TORCH_BACKPLANE_CUSOLVER_LIBRARY",
    package="nvidia-cusolver",
    functions=_C.cusolver_functions(),
    cuda={11: 12, 12: 13},
    instead="the CPU computes decompositions and solutions of linear systems",
)

_STATUSES = {
    1: "CUSOLVER_STATUS_NOT_INITIALIZED: cuSOLVER could not use the device",
    2: "CUSOLVER_STATUS_ALLOC_FAILED: not enough memory for cuSOLVER",
    3: "CUSOLVER_STATUS_INVALID_VALUE: an unsupported argument",
    4: "CUSOLVER_STATUS_ARCH_MISMATCH: the device does not support this function",
    5: "CUSOLVER_STATUS_MAPPING_ERROR: an access of device memory failed",
    6: "CUSOLVER_STATUS_EXECUTION_FAILED: a kernel could not be launched",
    7: "CUSOLVER_STATUS_INTERNAL_ERROR: an operation within cuSOLVER failed",
    8: "CUSOLVER_STATUS_MATRIX_TYPE_NOT_SUPPORTED",
    9: "CUSOLVER_STATUS_NOT_SUPPORTED: an unsupported call, or the capture of one that computes on the host, too",
    11: "CUSOLVER_STATUS_INVALID_LICENSE",
    31: "CUSOLVER_STATUS_INVALID_WORKSPACE: the workspace is too small",
}

_explain = partial(meaning, _STATUSES, "cusolver_common.h")


def library(functions: Mapping[str, int], index: int, capability: tuple[int, int]) -> Library:
    """Return cuSOLVER for a device.

    Args:
        functions: the addresses of the functions of PRODUCT.
        index: the device's number in CUDA.
        capability: its compute capability.
    """
    routines = {
        family: Routine(
            addresses={getattr(torch, name): address for name, address in addresses.items()},
            workspace=partial(_workspace, index, family),
        )
        for family, addresses in _C.cusolver_routines(dict(functions), index).items()
    }
    return Library(name=PRODUCT.name, routines=routines, explain=_explain)


def _workspace(index: int, family: str, dtype: torch.dtype, **integers: int) -> int:
    """Bytes of the workspace on the device. What a call needs on the host is allocated in the call."""
    given = [int(integers[name]) for name in FAMILIES[family].integers]
    status, nbytes = _C.cusolver_workspace(index, family, str(dtype).removeprefix("torch."), given)
    check(f"{PRODUCT.name} {family}", status, _explain)
    return nbytes
