"""Facts about this installation and its devices, for the commands that print them."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass

# Variables of other projects that affect Backplane. Its own variables begin with TORCH_BACKPLANE_.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_DEVICE_BACKEND_AUTOLOAD", "XDG_CACHE_HOME",
              "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTORCH_TESTING_DEVICE_ONLY_FOR")  # fmt: skip
# Backplane's own, and those of the OpenCL loader, PyOpenCL, PoCL, Mesa, Intel's runtime and Oclgrind.
_PREFIXES = ("TORCH_BACKPLANE_", "OCL_", "OPENCL_", "PYOPENCL_", "POCL_", "RUSTICL_", "CL_CONFIG_", "OCLGRIND_")


@dataclass(frozen=True)
class DeviceFacts:
    """Properties of a device. Memory is in bytes; ``free_memory`` is None if the driver does not report it."""

    index: int
    driver: str
    name: str
    software: str
    total_memory: int
    free_memory: int | None
    host_accessible: bool
    compute_units: int
    capability: tuple[int, int]
    dtypes: tuple[str, ...]


def devices() -> list[DeviceFacts]:
    """Return all devices of all drivers, after discovering them if necessary.

    Raises:
        ValueError: an environment variable names an unknown driver or is malformed.
    """
    from torch_backplane import _C, drivers

    drivers.discover()
    return [_facts_of(index) for index in range(_C.device_count())]


def _facts_of(index: int) -> DeviceFacts:
    import torch

    from torch_backplane import _C, drivers

    properties = _C.device_properties(index)
    try:
        free = torch.accelerator.get_memory_info(torch.device("bp", index))[0]
    except NotImplementedError:
        free = None
    return DeviceFacts(
        index=index,
        driver=properties.driver,
        name=properties.name,
        software=drivers.device(index).properties.software,
        total_memory=properties.total_memory,
        free_memory=free,
        host_accessible=properties.host_accessible,
        compute_units=properties.multi_processor_count,
        capability=(properties.major, properties.minor),
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in properties.dtypes),
    )


# Groups of dtypes with one name each, so that they fit in a table.
_DTYPE_FAMILIES = {
    "float64": ("float64",),
    "float32": ("float32",),
    "float16": ("float16",),
    "bfloat16": ("bfloat16",),
    "float8": ("float8_e4m3fn", "float8_e5m2"),
    "int64": ("int64",),
    "int8–32": ("int8", "int16", "int32"),
    "uint8": ("uint8",),
    "uint16–64": ("uint16", "uint32", "uint64"),
    "bool": ("bool",),
    "complex64": ("complex64",),
    "complex128": ("complex128",),
}


def dtype_summary(dtypes: tuple[str, ...]) -> str:
    """Summarize dtypes by groups that are supported completely. If few groups are missing, name those instead."""
    missing = [name for name, members in _DTYPE_FAMILIES.items() if not set(members) <= set(dtypes)]
    if not missing:
        return "all"
    if len(missing) <= 3:
        return "all but " + ", ".join(missing)
    return ", ".join(name for name, members in _DTYPE_FAMILIES.items() if set(members) <= set(dtypes))


def versions() -> dict[str, str]:
    """Return the versions that can matter for a bug report."""
    import torch

    import torch_backplane

    config = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    return {
        "torch_backplane": torch_backplane.__version__,
        "torch": torch.__version__,
        "torch built with": next((line for line in config if line.startswith("GCC") or "lang" in line), "unknown"),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "python": sys.version.replace("\n", " "),
        "C library": " ".join(platform.libc_ver()) or "unknown",
        "OS": platform.platform(),
        "processor": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
    }


def environment() -> dict[str, str]:
    """Return the environment variables that are set and affect Backplane."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) or name in _VARIABLES
    }


def allocator_settings() -> str:
    """Return the current allocator options, in the form that PyTorch stores."""
    import torch

    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return "PyTorch 2.11 does not report them"
    return torch._C._accelerator_getAllocatorSettings() or "defaults"
