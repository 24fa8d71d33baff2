"""Selects the emulated HIP devices, for `pytest --on hip`. What `--on cuda` leaves out is left out."""

from __future__ import annotations

import sys

import on_cuda
import on_opencl


def environment() -> dict[str, str]:
    """Returns the environment variables with which a program uses four emulated devices."""
    sys.path.insert(0, str(on_cuda.EMULATOR))
    import emulator

    folder = emulator.library_folder()
    return {
        "TORCH_BACKPLANE_HIP_LIBRARY": str(folder / "libamdhip64.so.6"),
        "TORCH_BACKPLANE_HIPRTC_LIBRARY": str(folder / "libhiprtc.so.6"),
        "CUDA_EMULATOR_DEVICES": str(on_opencl.DEVICES),
        "TORCH_BACKPLANE_DRIVERS": "hip",
        "TORCH_BACKPLANE_CACHE_DIR": str(folder / "cache"),  # kernels fit the version of the emulator
    }
