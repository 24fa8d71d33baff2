"""The target of a CUDA device: the properties that kernels depend on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cuda.bindings.driver import CUdevice_attribute

from torch_backplane.kernels.target import Target

# Bytes of arguments that every architecture and driver accepts.
ARGUMENT_BYTES = 4096

_ATOMICS = (torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float32, torch.float64)
# The compute capability from which on mma.sync multiplies a dtype (PTX ISA, «Warp-level matrix instructions»).
_TENSOR_CORES = {torch.float16: (7, 5), torch.bfloat16: (8, 0)}


def target(attribute: Callable[[CUdevice_attribute], int]) -> Target:
    """Return the target of a device.

    `local_memory` is the limit of shared memory that a kernel declares. More is only available dynamically.

    Args:
        attribute: returns an attribute of the device.
    """
    name = CUdevice_attribute
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
        matrix_dtypes=frozenset(dtype for dtype, least in _TENSOR_CORES.items() if capability >= least),
        cache_bytes=attribute(name.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
    )
