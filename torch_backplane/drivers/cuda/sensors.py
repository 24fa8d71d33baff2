"""The sensors of a GPU, which NVML reads. NVML is loaded at the first reading.

NVML's numbers of GPUs are not CUDA's (CUDA_VISIBLE_DEVICES), so a GPU is found by its PCI bus ID.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch_backplane.drivers.cuda import library

_GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU
_SM_CLOCK = 1  # NVML_CLOCK_SM


def _memory_used(nvml: Any, gpu: int) -> int:
    memory = nvml.device_get_memory_info_v2(gpu)
    return memory.total - memory.free  # with what the driver reserves, as in torch.cuda


# How each sensor of torch_backplane.drivers.base.SENSORS is read.
READERS: dict[str, Callable[[Any, int], int]] = {
    "temperature": lambda nvml, gpu: nvml.device_get_temperature_v(gpu, _GPU_SENSOR),
    "power_draw": lambda nvml, gpu: nvml.device_get_power_usage(gpu),
    "clock_rate": lambda nvml, gpu: nvml.device_get_clock_info(gpu, _SM_CLOCK),
    "utilization": lambda nvml, gpu: nvml.device_get_utilization_rates(gpu).gpu,
    "memory_usage": lambda nvml, gpu: nvml.device_get_utilization_rates(gpu).memory,
    "device_memory_used": _memory_used,
}


def read(name: str, bus: str) -> int:
    """Read a sensor of the GPU at a PCI bus ID, such as "0000:65:00.0".

    Raises:
        ModuleNotFoundError: cuda-bindings has no NVML.
        NotImplementedError: the GPU does not have the sensor.
        RuntimeError: NVML is missing, or it failed.
    """
    nvml = _initialized()
    try:
        return int(READERS[name](nvml, nvml.device_get_handle_by_pci_bus_id_v2(bus)))
    except nvml.NvmlError as error:
        kind = NotImplementedError if isinstance(error, nvml.NotSupportedError) else RuntimeError
        raise kind(f"NVML cannot read the {name} of the GPU at {bus}: {_described(nvml, error)}") from error
    except RuntimeError as error:  # NVML lacks the function
        raise RuntimeError(
            f"NVML cannot read the {name} of the GPU at {bus}: {error}; update NVIDIA's driver"
        ) from error


@functools.cache
def _initialized() -> Any:
    try:
        from cuda.bindings import nvml
    except ImportError as error:
        remedy = "pip install -U cuda-bindings; for CUDA 12: pip install -U 'cuda-bindings==12.*'"
        raise ModuleNotFoundError(f"sensors need a cuda-bindings with NVML ({error}); {remedy}") from error
    try:
        library.load_chosen_nvml()
        nvml.init_v2()
    except nvml.NvmlError as error:
        raise RuntimeError(f"NVML cannot be initialized: {_described(nvml, error)}") from error
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"NVML cannot be loaded: {str(error).rstrip('.')}; it is a part of NVIDIA's driver; "
            "in a container: docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        ) from error
    return nvml


def _described(nvml: Any, error: Any) -> str:
    """Return the name, the number and the meaning of an error."""
    try:
        name = f"NVML_{nvml.Return(error.status).name}"
    except ValueError:  # newer than cuda-bindings
        name = "NVML error"
    return f"{name} ({error.status}): {error}"
