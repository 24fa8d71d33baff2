"""Finds and loads NVIDIA's libraries, with the search that cuda-bindings uses for NVRTC.

The search (cuda-pathfinder) looks into PyPI packages, conda environments and CUDA toolkits. A variable names a file
instead, or switches the library off with «none».
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from torch_backplane.drivers.base import Finding
from torch_backplane.drivers.cuda import library

OFF = "none"
_MAJOR, _MINOR = 0, 1  # libraryPropertyType


def toolkit_version(loaded: ctypes.CDLL, product: Product) -> tuple[int, int]:
    """Return the version that a library's function GetProperty tells; -1 where it tells nothing."""
    return _property(loaded, product, _MAJOR), _property(loaded, product, _MINOR)


def _property(loaded: ctypes.CDLL, product: Product, which: int) -> int:
    value = ctypes.c_int(-1)
    loaded[f"{product.file}GetProperty"](which, ctypes.byref(value))
    return value.value


@dataclass(frozen=True, kw_only=True)
class Product:
    """A library of the CUDA toolkit, or NCCL.

    Args:
        name: NVIDIA's name, for messages.
        file: its name in cuda-pathfinder.
        variable: the environment variable that names a file.
        package: the PyPI package for CUDA 13 and later.
        functions: the C functions that are called.
        version: returns the library's version. The default asks its function GetProperty.
        cuda: the major version of CUDA, by the known major versions of the library. Empty: its version does not tell.
        oldest: the first version that has what is needed.
        instead: what happens without the library.
    """

    name: str
    file: str
    variable: str
    package: str
    functions: list[str]
    instead: str
    version: Callable[[ctypes.CDLL, Product], tuple[int, int]] = toolkit_version
    cuda: Mapping[int, int] = field(default_factory=dict)
    oldest: tuple[int, int] = (0, 0)

    def package_for(self, cuda_major: int) -> str:
        """Return the PyPI package for a major version of CUDA."""
        return self.package if cuda_major >= 13 else f"{self.package.removesuffix('-cu13')}-cu{cuda_major}"


@dataclass(frozen=True)
class Found:
    """The functions of a library by name, its name with its version, and the finding. No functions: it is not used."""

    finding: Finding
    functions: Mapping[str, int] = field(default_factory=dict)
    version: str = ""


def load(product: Product, cuda_version: tuple[int, int]) -> Found:
    """Load a library, if it is installed and works with NVIDIA's driver.

    Args:
        product: the library.
        cuda_version: the version of CUDA that NVIDIA's driver supports.
    """
    chosen = os.environ.get(product.variable, "").strip()
    install = f"pip install {product.package_for(cuda_version[0])}"
    if chosen == OFF:
        return Found(Finding(product.name, True, f"switched off by {product.variable}: {product.instead}"))
    try:
        loaded = ctypes.CDLL(chosen or _search(product))
    except ModuleNotFoundError:
        found = f"not searched for, because cuda-pathfinder is not installed: {product.instead}"
        return Found(Finding(product.name, True, found, f"pip install cuda-pathfinder; {install}"))
    except _Absent:
        return Found(Finding(product.name, True, f"not installed: {product.instead}", install))
    except Exception as error:  # damaged, for another system, or without what it depends on
        found = f"is not used: {type(error).__name__}: {error}".splitlines()[0]
        return Found(Finding(product.name, False, found, f"pip install --force-reinstall {install.split()[-1]}"))
    functions = library.addresses(loaded, product.functions)
    missing = [name for name in product.functions if name not in functions]
    if missing:
        return Found(Finding(product.name, False, f"is not used: it has no function {', '.join(missing)}", install))
    version = product.version(loaded, product)
    name = f"{version[0]}.{version[1]}"
    if version < product.oldest:
        needed = f"{product.oldest[0]}.{product.oldest[1]}"
        found = f"version {name} is not used: version {needed} or later is required"
        return Found(Finding(product.name, False, found, f"pip install --upgrade {install.split()[-1]}"))
    made_for = product.cuda.get(version[0])
    if product.cuda and (made_for is None or made_for > cuda_version[0]):
        of = "an unknown version of CUDA" if made_for is None else f"CUDA {made_for}"
        found = f"version {name} is not used: it is for {of}, and NVIDIA's driver supports CUDA {cuda_version[0]}"
        # cuda-pathfinder prefers the package for later versions
        remedy = install if chosen or made_for is None else f"pip uninstall {product.package}; {install}"
        return Found(Finding(product.name, False, found, remedy))
    return Found(Finding(product.name, True, f"version {name}"), functions, f"{product.name} {name}")


def meaning(statuses: Mapping[int, str], header: str, status: int) -> str:
    """Return the meaning of a status of a routine: one of the library, or a negative one of libcuda.

    Args:
        statuses: the meanings of the library's statuses.
        header: the file that explains the others.
        status: other than 0.
    """
    if status < 0:
        from torch_backplane.drivers.cuda.errors import describe, failed_call

        call = failed_call(-status)
        return f"{call} answered {describe(-status)}" if call else describe(-status)
    return statuses.get(status, f"see {header}")


def check(routine: str, status: int, explain: Callable[[int], str]) -> None:
    """Check the status of a call that prepares a routine: made while a planner runs, it can still choose another one.

    Does nothing for negative statuses, after which the routine itself fails: the runtime then asks whether the device
    is lost.

    Raises:
        torch.AcceleratorError: the library failed.
    """
    if status > 0:
        raise torch.AcceleratorError(f"{routine} answered {status}, which is: {explain(status)}")


class _Absent(Exception):
    """The library is not installed."""


def _search(product: Product) -> str:
    """Return the file of the library that cuda-pathfinder finds and loads.

    Raises:
        ModuleNotFoundError: cuda-pathfinder is not installed.
        _Absent: it finds none.
        Exception: the library cannot be loaded.
    """
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        path = load_nvidia_dynamic_lib(product.file).abs_path
    except DynamicLibNotFoundError as error:
        raise _Absent from error
    if path is None:
        raise OSError("cuda-pathfinder does not tell its file")
    return path
