"""NCCL, NVIDIA's collective communication, if it is installed (`pip install nvidia-nccl-cu13`).

`torch.distributed` uses it for tensors of CUDA devices (csrc/distributed/library_backend.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_backplane import _C
from torch_backplane.drivers.cuda.libraries.loading import Product


def _version(loaded: ctypes.CDLL, product: Product) -> tuple[int, int]:
    """Return the version; (0, 0) if NCCL does not tell."""
    number = ctypes.c_int(0)
    loaded.ncclGetVersion(ctypes.byref(number))
    factor = 10000 if number.value >= 10000 else 1000  # since version 2.9: 2 * 10000 + 9 * 100
    return number.value // factor, number.value % factor // 100


PRODUCT = Product(
    name="NCCL",
    file="nccl",
    variable="TORCH_BACKPLANE_NCCL_LIBRARY",
    package="nvidia-nccl-cu13",
    functions=[*_C.nccl_functions(), "ncclGetVersion"],
    version=_version,
    oldest=(2, 14),  # communicators with blocking = 0
    instead="collectives use copies in host memory",
)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def library(functions: Mapping[str, int], version: str, index: int, bus: str) -> Any:
    """Return NCCL for a device, a `_C.CommunicationLibrary`.

    Args:
        functions: the addresses of the functions of PRODUCT.
        version: the name with the version.
        index: the device's number in CUDA.
        bus: its PCI bus id. NCCL does not connect two ranks whose GPUs have one bus id on one machine.
    """
    return _C.nccl_library(dict(functions), index, version, f"{_BOOT_ID.read_text(encoding='ascii').strip()} {bus}")
