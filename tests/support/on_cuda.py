"""Selects CUDA devices for `pytest --on cuda`: those of the emulator, unless TORCH_BACKPLANE_CUDA_LIBRARY is set.

`TORCH_BACKPLANE_CUDA_LIBRARY=libcuda.so.1 pytest --on cuda` runs on GPUs. TESTS are left out, and what `--on opencl`
leaves out (on_opencl.py).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import on_opencl

_DLPACK = "the CUDA driver exports tensors as CUDA's; see test_cuda_device.py"

# "file::test" → why the test is not for CUDA devices.
TESTS = {
    "test_dlpack_numpy.py::test_from_dlpack_accepts_tensors": _DLPACK,
    "test_candidates.py::test_driver_library_is_skipped_if_copies_exceed_the_workspace": "it tests CLBlast",
    "test_checked_values.py::test_reading_a_valid_result_synchronizes_once": "it counts what the OpenCL driver does",
    "test_dlpack_numpy.py::test_there_is_no_cuda_array_interface": _DLPACK,
    "test_inductor_backend.py::test_devices_that_do_not_run_triton_are_refused": "CUDA devices run Triton kernels",
    "test_processes.py::test_other_devices_refuse": "the CUDA driver shares memory and events",
    "test_streams.py::test_invalid_external_streams_raise": "1 is CUDA's default stream; see test_cuda_device.py",
    "test_streams.py::test_sharing_between_processes_is_refused": "the CUDA driver shares memory and events",
    "test_threads.py::test_profiles_end_while_other_threads_compute": "its 1,024 pending kernels take seconds",
    "test_torch_bp.py::test_device_memory_used": "the emulator's sensors are constant; see test_cuda_sensors.py",
}

# `pytest --on cuda` tests what happens without these libraries, unless the variables name them.
LIBRARIES = tuple(
    f"TORCH_BACKPLANE_{name}_LIBRARY" for name in ("CUBLAS", "CUBLASLT", "CUDNN", "CUSOLVER", "CUFFT", "NCCL")
)

EMULATOR = Path(__file__).resolve().parents[1] / "cuda_emulator"


def environment() -> dict[str, str]:
    """Returns the environment variables with which a program uses four emulated devices."""
    sys.path.insert(0, str(EMULATOR))
    import emulator

    folder = emulator.library_folder()
    return {
        "TORCH_BACKPLANE_CUDA_LIBRARY": str(folder / "libcuda.so.1"),
        "TORCH_BACKPLANE_NVRTC_LIBRARY": str(folder / "libnvrtc.so.13"),
        "TORCH_BACKPLANE_NVML_LIBRARY": str(folder / "libnvidia-ml.so.1"),
        "CUDA_EMULATOR_DEVICES": str(on_opencl.DEVICES),
        "TORCH_BACKPLANE_DRIVERS": "cuda",
        "TORCH_BACKPLANE_CACHE_DIR": str(folder / "cache"),  # kernels fit the version of the emulator
        **emulator.libraries(),
    }


def missing() -> str:
    """Returns what is missing for tests of the CUDA driver, or an empty string."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "needs cuda-bindings (pip install cuda-bindings)"
    return ""


def choose_devices() -> int:
    """Makes this process and its children use CUDA devices. Call before bp is used. Returns the number of devices."""
    if missing():
        return 0
    if "TORCH_BACKPLANE_CUDA_LIBRARY" not in os.environ:
        os.environ.update(environment() | {name: os.environ.get(name, "none") for name in LIBRARIES})
    from torch_backplane.drivers.cuda import CUDADriver

    found = len(CUDADriver().devices())
    os.environ["TORCH_BACKPLANE_DRIVERS"] = "cuda" if found >= on_opencl.DEVICES else "cuda,host"
    os.environ["TORCH_BACKPLANE_HOST_DEVICES"] = str(max(1, on_opencl.DEVICES - found))
    return found
