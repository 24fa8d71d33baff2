"""cuBLASLt, NVIDIA's matrix products with a choice of algorithms, and with a bias and an activation.

It is installed with cuBLAS (`pip install nvidia-cublas`). What it may round, and how it may divide sums, is the same as
for cuBLAS; sums are not divided if that is not allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from torch_backplane import _C
from torch_backplane.drivers.cuda.libraries import cublas
from torch_backplane.drivers.cuda.libraries.loading import Product, check
from torch_backplane.drivers.libraries import FAMILIES, Library, Routine

PRODUCT = Product(
    name="cuBLASLt",
    file="cublasLt",
    variable="TORCH_BACKPLANE_CUBLASLT_LIBRARY",
    package="nvidia-cublas",
    functions=_C.cublaslt_functions(),
    cuda={12: 12, 13: 13},
    instead="separate kernels add the bias of matrix products and compute their activation",
)

_NOT_SUPPORTED = 15  # CUBLAS_STATUS_NOT_SUPPORTED: no algorithm
_MOST_MATRICES = 2**31 - 1


def library(functions: Mapping[str, int], index: int, capability: tuple[int, int]) -> Library:
    """Return cuBLASLt for a device.

    Args:
        functions: the addresses of the functions of PRODUCT.
        index: the device's number in CUDA.
        capability: its compute capability.
    """
    found = _C.cublaslt_routines(dict(functions), index, cublas.workspace_bytes(capability))

    def routine(family: str) -> Routine:
        addresses = {getattr(torch, name): address for name, address in found[family].items()}
        return Routine(
            addresses={dtype: one for dtype, one in addresses.items() if cublas.supports(dtype, capability)},
            guard=partial(_guard, index, family),
            workspace=partial(_workspace, index, family),
            forms=partial(_forms, index, family),
            tf32=cublas.has_tf32(capability),
        )

    routines = {family: routine(family) for family in found}
    return Library(name=PRODUCT.name, routines=routines, explain=cublas.explain)


def _guard(index: int, family: str, dtype: torch.dtype, **integers: int) -> str | None:
    if integers["batch"] > _MOST_MATRICES:
        return f"takes up to {_MOST_MATRICES} matrices"
    if integers["depth"] == 0:
        return "takes no empty sums"
    status, count, _ = _algorithms(index, family, dtype, integers)
    if status == _NOT_SUPPORTED:
        return "has no algorithm for this product"
    form = integers["form"]
    return f"has {count} algorithms for this product, and no number {form}" if 0 < count <= form else None


def _workspace(index: int, family: str, dtype: torch.dtype, **integers: int) -> int:
    """Bytes of the workspace of the algorithm. Only the heuristic tells, so the runtime has a plan for each size."""
    status, _, nbytes = _algorithms(index, family, dtype, integers)
    check(f"{PRODUCT.name} {family}", status, cublas.explain)
    return nbytes


def _forms(index: int, family: str, dtype: torch.dtype, **integers: int) -> int:
    _, count, _ = _algorithms(index, family, dtype, integers)
    return count


def _algorithms(index: int, family: str, dtype: torch.dtype, integers: Mapping[str, int]) -> tuple[int, int, int]:
    """A status, how many algorithms there are, and the bytes of workspace of the one that `form` selects."""
    given = [int(integers[name]) for name in FAMILIES[family].integers]
    return _C.cublaslt_algorithms(index, family, str(dtype).removeprefix("torch."), given)
