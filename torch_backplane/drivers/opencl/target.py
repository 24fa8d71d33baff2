"""The target of an OpenCL device: the properties that kernels depend on."""

from __future__ import annotations

from typing import Any

import pyopencl as cl
import torch

from torch_backplane.kernels.dialects.opencl_c import SUBGROUP_SHUFFLES
from torch_backplane.kernels.target import Target


def target(device: cl.Device, kind: str) -> Target:
    """Return the target of a device.

    Properties that the implementation does not report, or reports with an impossible value, are those of
    `Target.of_kind`.

    Args:
        device: the device.
        kind: its `DeviceProperties.kind`.
    """
    has = set((_query(device, "extensions") or "").split())
    lanes = _first(device, "warp_size_nv", "wavefront_width_amd", "preferred_work_group_size_multiple")
    items = (_query(device, "max_work_group_size"), *(_query(device, "max_work_item_sizes") or [])[:1])
    most = min(items) if all(items) else 0
    if lanes is not None and lanes > most:
        lanes = None
    # On other devices (Intel's), the compiler chooses the subgroup size for each kernel.
    fixed = lanes is not None and lanes == _first(device, "warp_size_nv", "wavefront_width_amd")
    # If the native vector width of a processor is 1, its compiler vectorizes across neighbouring work items (Mesa).
    simt = Target.of_kind(kind).simt or _query(device, "native_vector_width_float") == 1
    figures = {
        "simt": simt,
        "max_group_size": most,
        "group_multiple": lanes,
        "subgroup_size": lanes if simt else 1,
        "subgroup_shuffles": simt and fixed and has.issuperset(SUBGROUP_SHUFFLES),
        "local_memory": _query(device, "local_mem_size"),
        "compute_units": _query(device, "max_compute_units"),
        "max_argument_bytes": _query(device, "max_parameter_size"),
        "atomics": _atomics(has),
        "float64": bool(_query(device, "double_fp_config")),
        "native_float16": "cl_khr_fp16" in has or not simt,  # on a processor, the compiler decides
        "cache_bytes": _query(device, "global_mem_cache_size"),
    }
    return Target.of_kind(kind, **{name: value for name, value in figures.items() if Target.accepts(name, value)})


def _query(device: cl.Device, name: str) -> Any:
    """Return a device property, or None if the implementation does not know it or fails."""
    try:
        return getattr(device, name)
    except (cl.Error, AttributeError):
        return None


def _first(device: cl.Device, *names: str) -> Any:
    """Return the first of several device properties that is known and not 0, or None."""
    return next(filter(None, (_query(device, name) for name in names)), None)


def _atomics(extensions: set[str]) -> frozenset[torch.dtype]:
    """Return the dtypes with atomics. 32-bit atomics are part of OpenCL since version 1.1."""
    dtypes = [torch.int32, torch.uint32]
    if "cl_khr_int64_base_atomics" in extensions:
        dtypes += [torch.int64, torch.uint64]
    return frozenset(dtypes)
