"""NVIDIA's libraries for CUDA devices, if they are installed: cuBLAS, cuBLASLt, cuDNN, cuFFT, cuSOLVER and NCCL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch_backplane.drivers.base import Finding
from torch_backplane.drivers.cuda.libraries import cublas, cublaslt, cudnn, cufft, cusolver, nccl
from torch_backplane.drivers.cuda.libraries.loading import load
from torch_backplane.drivers.libraries import Library


class Loaded(NamedTuple):
    """The libraries that were found.

    Args:
        makers: functions that return a library for a device, from its number in CUDA and its compute capability.
        communication: a function that returns a communication library for a device, from its number in CUDA and its PCI
            bus id; None if there is none.
        findings: one for each library, also for those that were not found.
        versions: such as "cuBLAS 13.1".
    """

    makers: tuple[Callable[[int, tuple[int, int]], Library], ...]
    communication: Callable[[int, str], Any] | None
    findings: tuple[Finding, ...]
    versions: tuple[str, ...]

    def of_device(self, index: int, capability: tuple[int, int]) -> tuple[Library, ...]:
        """Return the libraries for a device."""
        return tuple(make(index, capability) for make in self.makers)


def load_all(cuda_version: tuple[int, int]) -> Loaded:
    """Load the installed libraries.

    Args:
        cuda_version: the version of CUDA that NVIDIA's driver supports.
    """
    found = [(module, load(module.PRODUCT, cuda_version)) for module in (cublas, cublaslt, cudnn, cufft, cusolver)]
    communication = load(nccl.PRODUCT, cuda_version)
    every = [one for _, one in found] + [communication]
    return Loaded(
        makers=tuple(partial(module.library, one.functions) for module, one in found if one.functions),
        communication=partial(nccl.library, communication.functions, communication.version)
        if communication.functions
        else None,
        findings=tuple(one.finding for one in every),
        versions=tuple(one.version for one in every if one.functions),
    )
