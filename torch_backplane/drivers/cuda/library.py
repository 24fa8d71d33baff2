"""Loads libcuda, NVRTC and NVML. Imports nothing of CUDA.

TORCH_BACKPLANE_CUDA_LIBRARY    the file of libcuda, for example that of an emulator
TORCH_BACKPLANE_NVRTC_LIBRARY   the file of NVRTC
TORCH_BACKPLANE_NVML_LIBRARY    the file of NVML (libnvidia-ml)

cuda-bindings uses a library that is already loaded, so they are loaded here before it needs them.
"""

from __future__ import annotations

import ctypes
import os
import sys

CUDA_VARIABLE = "TORCH_BACKPLANE_CUDA_LIBRARY"
NVRTC_VARIABLE = "TORCH_BACKPLANE_NVRTC_LIBRARY"
NVML_VARIABLE = "TORCH_BACKPLANE_NVML_LIBRARY"

_SYSTEM_CUDA = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def cuda_name() -> str:
    """Return the file of libcuda, or its name if the system's loader finds it."""
    return os.environ.get(CUDA_VARIABLE, "").strip() or _SYSTEM_CUDA


def load_cuda() -> ctypes.CDLL:
    """Load libcuda. This initializes nothing.

    Raises:
        OSError: it is not installed or cannot be loaded.
    """
    return ctypes.CDLL(cuda_name())


def load_chosen_nvrtc() -> None:
    """Load the NVRTC of TORCH_BACKPLANE_NVRTC_LIBRARY. Without the variable, cuda-bindings finds one when it needs it.

    Raises:
        OSError: the file cannot be loaded.
    """
    _load_chosen(NVRTC_VARIABLE)


def load_chosen_nvml() -> None:
    """Load the NVML of TORCH_BACKPLANE_NVML_LIBRARY. Without the variable, cuda-bindings finds that of NVIDIA's driver.

    Raises:
        OSError: the file cannot be loaded.
    """
    _load_chosen(NVML_VARIABLE)


def _load_chosen(variable: str) -> None:
    chosen = os.environ.get(variable, "").strip()
    if chosen:
        ctypes.CDLL(chosen)


def addresses(library: ctypes.CDLL, names: list[str]) -> dict[str, int]:
    """Return the addresses of functions. A function that the library lacks is not in the result."""
    found = {}
    for name in names:
        function = getattr(library, name, None)
        if function is not None:
            found[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
    return found
