"""The target of a CUDA or HIP device: the properties that kernels depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_backplane.drivers.cuda.platforms import driver as cuda
from torch_backplane.kernels.target import Target

# Bytes of arguments that every architecture and driver accepts.
ARGUMENT_BYTES = 4096

_ATOMICS = (torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float32, torch.float64)


def target(attribute: Callable[[Any], int], matrix_capabilities: Mapping[torch.dtype, tuple[int, int]]) -> Target:
    """Return the target of a device.

    `local_memory` is the limit of shared memory that a kernel declares. More is only available dynamically.

    Args:
        attribute: returns an attribute of the device.
        matrix_capabilities: see `CudaCpp`.
    """
    name = cuda.CUdevice_attribute
    capability = (
        attribute(name.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        attribute(name.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
    )
    warp = attribute(name.CU_DEVICE_ATTRIBUTE_WARP_SIZE)
    return Target.of_kind(
        "gpu",
        max_group_size=attribute(name.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
        group_multiple=warp,
        subgroup_size=warp,
        subgroup_shuffles=True,
        local_memory=attribute(name.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
        compute_units=attribute(name.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        max_argument_bytes=ARGUMENT_BYTES,
        atomics=frozenset(_ATOMICS),
        native_float16=True,
        matrix_dtypes=frozenset(dtype for dtype, least in matrix_capabilities.items() if capability >= least),
        cache_bytes=attribute(name.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
    )
