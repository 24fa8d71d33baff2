"""The functions that this folder calls: CUDA's, of cuda-bindings, or those of HIP under CUDA's names (drivers/hip/).

A process has devices of one platform only, because the native launcher (csrc/drivers/cuda/) has one table of functions.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any


class OtherPlatform(RuntimeError):
    """The process has devices of another platform."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Whose functions are called.

    Args:
        name: of the platform, for messages and the kernel cache.
        compiler: the name of its runtime compiler.
        driver: the module with the functions, types and constants of cuda.bindings.driver that are used here.
        nvrtc: the module with those of cuda.bindings.nvrtc.
        options_variable: the environment variable with more options of the compiler.
        architecture_option: the option of the compiler for the architecture.
        name_of: returns the platform's name of a function of CUDA's driver API.
        remedies: what helps, by status.
    """

    name: str
    compiler: str
    driver: str
    nvrtc: str
    options_variable: str
    architecture_option: str
    name_of: Callable[[str], str]
    remedies: Mapping[int, str]


_ADDRESS = (
    "to find the kernel, run with TORCH_BACKPLANE_LAUNCH_BLOCKING=1, or under compute-sanitizer with "
    'TORCH_BACKPLANE_CUDA_OPTIONS="--generate-line-info"'
)

_REMEDIES = {
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

CUDA = Platform(
    name="CUDA",
    compiler="NVRTC",
    driver="cuda.bindings.driver",
    nvrtc="cuda.bindings.nvrtc",
    options_variable="TORCH_BACKPLANE_CUDA_OPTIONS",
    architecture_option="--gpu-architecture",
    name_of=lambda name: name,
    remedies=_REMEDIES,
)

_chosen = CUDA
_is_used = False


def chosen() -> Platform:
    """Return the platform of this process."""
    return _chosen


def choose(platform: Platform) -> None:
    """Choose the platform of this process.

    Raises:
        OtherPlatform: it has devices of another one.
    """
    global _chosen
    if _is_used and platform is not _chosen:
        raise OtherPlatform(f"this process uses {_chosen.name}, and cannot use {platform.name} as well")
    _chosen = platform


def keep() -> None:
    """Keep the chosen platform from now on, because a device of it is made."""
    global _is_used
    _is_used = True


class _Chosen:
    """The module of the chosen platform."""

    def __init__(self, which: str) -> None:
        self._which = which

    def __getattr__(self, name: str) -> Any:
        return getattr(_module(getattr(_chosen, self._which)), name)


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


driver: Any = _Chosen("driver")
nvrtc: Any = _Chosen("nvrtc")
