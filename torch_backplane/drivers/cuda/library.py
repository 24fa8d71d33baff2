"""Loads libcuda, NVRTC and NVML.

TORCH_BACKPLANE_CUDA_LIBRARY    the file of libcuda, for example that of an emulator
TORCH_BACKPLANE_NVRTC_LIBRARY   the file of NVRTC
TORCH_BACKPLANE_NVML_LIBRARY    the file of NVML (libnvidia-ml)

cuda-bindings uses a library that is already loaded, so they are loaded here before it needs them.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import types

CUDA_VARIABLE = "TORCH_BACKPLANE_CUDA_LIBRARY"
NVRTC_VARIABLE = "TORCH_BACKPLANE_NVRTC_LIBRARY"
NVML_VARIABLE = "TORCH_BACKPLANE_NVML_LIBRARY"

_SYSTEM_CUDA = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


# The modules of cuda-bindings that load NVRTC: in version 13.5, and in version 13.0.
_NVRTC_MODULES = {"cuda.bindings._internal.nvrtc", "cuda.bindings._bindings.cynvrtc"}


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

    cuda-bindings uses the NVRTC that was loaded first, and CUDA builds of PyTorch load theirs. Therefore the modules of
    cuda-bindings get a function that finds the chosen one. It has no effect if the program has called NVRTC before, or
    has loaded another one with RTLD_GLOBAL.

    Raises:
        OSError: the file cannot be loaded.
    """
    chosen = _load_chosen(NVRTC_VARIABLE)
    if chosen is not None:
        importlib.import_module("cuda.bindings.nvrtc")
        found = types.SimpleNamespace(_handle_uint=chosen._handle)
        for name in _NVRTC_MODULES & sys.modules.keys():
            vars(sys.modules[name])["load_nvidia_dynamic_lib"] = lambda libname: found


def load_chosen_nvml() -> None:
    """Load the NVML of TORCH_BACKPLANE_NVML_LIBRARY. Without the variable, cuda-bindings finds that of NVIDIA's driver.

    Raises:
        OSError: the file cannot be loaded.
    """
    _load_chosen(NVML_VARIABLE)


def _load_chosen(variable: str) -> ctypes.CDLL | None:
    chosen = os.environ.get(variable, "").strip()
    return ctypes.CDLL(chosen) if chosen else None


def addresses(library: ctypes.CDLL, names: list[str]) -> dict[str, int]:
    """Return the addresses of functions. A function that the library lacks is not in the result."""
    found = {}
    for name in names:
        function = getattr(library, name, None)
        if function is not None:
            found[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
    return found
