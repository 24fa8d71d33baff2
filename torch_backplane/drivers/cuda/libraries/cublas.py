"""cuBLAS, NVIDIA's matrix products and triangular systems, if it is installed (`pip install nvidia-cublas`).

float32 products are computed in float32, and those of float16 and bfloat16 are accumulated in float32, with partial
sums that are not rounded, unless the call allows otherwise (`Allowed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from torch_backplane import _C
from torch_backplane.drivers.cuda.libraries.loading import Product, check, meaning
from torch_backplane.drivers.libraries import Allowed, Library, Routine

PRODUCT = Product(
    name="cuBLAS",
    file="cublas",
    variable="TORCH_BACKPLANE_CUBLAS_LIBRARY",
    package="nvidia-cublas",
    functions=_C.cublas_functions(),
    cuda={12: 12, 13: 13},
    instead="generated kernels compute matrix products, and the CPU solves triangular systems",
)

# The workspace that NVIDIA recommends (cublasSetWorkspace): bytes from Hopper on, and before.
WORKSPACE, WORKSPACE_BEFORE_HOPPER = 32 << 20, 4 << 20

_STATUSES = {
    1: "CUBLAS_STATUS_NOT_INITIALIZED: cuBLAS could not use the device",
    3: "CUBLAS_STATUS_ALLOC_FAILED: not enough memory for cuBLAS",
    7: "CUBLAS_STATUS_INVALID_VALUE: an unsupported argument",
    8: "CUBLAS_STATUS_ARCH_MISMATCH: the device does not support this product",
    11: "CUBLAS_STATUS_MAPPING_ERROR: an access of device memory failed",
    13: "CUBLAS_STATUS_EXECUTION_FAILED: a kernel could not be launched",
    14: "CUBLAS_STATUS_INTERNAL_ERROR: an operation within cuBLAS failed",
    15: "CUBLAS_STATUS_NOT_SUPPORTED: an unsupported call",
    16: "CUBLAS_STATUS_LICENSE_ERROR",
}


explain = partial(meaning, _STATUSES, "cublas_api.h")


def supports(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Return whether products of a dtype that cuBLAS and cuBLASLt have can be computed."""
    return dtype != torch.bfloat16 or capability >= (8, 0)


def has_tf32(capability: tuple[int, int]) -> bool:
    """Return whether there is TF32."""
    return capability >= (8, 0)


def workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of workspace that a product can have."""
    return WORKSPACE if capability >= (9, 0) else WORKSPACE_BEFORE_HOPPER


def library(functions: Mapping[str, int], index: int, capability: tuple[int, int]) -> Library:
    """Return cuBLAS for a device.

    Args:
        functions: the addresses of the functions of PRODUCT.
        index: the device's number in CUDA.
        capability: its compute capability.
    """
    found = {
        family: {getattr(torch, name): address for name, address in addresses.items()}
        for family, addresses in _C.cublas_routines(dict(functions), index).items()
    }
    nbytes = workspace_bytes(capability)

    def workspace(family: str, dtype: torch.dtype, **integers: int) -> int:
        check(f"{PRODUCT.name} {family}", _C.cublas_prepare(index), explain)
        return nbytes

    matmul = Routine(
        addresses={dtype: one for dtype, one in found["matmul"].items() if supports(dtype, capability)},
        guard=_guard,
        workspace=partial(workspace, "matmul"),
        tf32=has_tf32(capability),
    )
    solve = Routine(addresses=found["triangular_solve"], workspace=partial(workspace, "triangular_solve"))
    return Library(name=PRODUCT.name, routines={"matmul": matmul, "triangular_solve": solve}, explain=explain)


def _guard(dtype: torch.dtype, allowed: int, **integers: int) -> str | None:
    return None if allowed & Allowed.DIVIDED_SUMS else "can divide sums"
