"""What an OpenCL device says of itself that kernels depend on."""

from __future__ import annotations

from typing import Any

import pyopencl as cl
import torch

from torch_backplane.kernels.dialects.opencl_c import SUBGROUP_SHUFFLES
from torch_backplane.kernels.target import Target


def target(device: cl.Device, kind: str) -> Target:
    """The target of a device of this kind (`DeviceProperties.kind`).

    What an implementation does not answer, or answers with a figure that cannot be, is as `Target.of_kind` has it.
    """
    has = set((_ask(device, "extensions") or "").split())
    lanes = _first(device, "warp_size_nv", "wavefront_width_amd", "preferred_work_group_size_multiple")
    items = (_ask(device, "max_work_group_size"), *(_ask(device, "max_work_item_sizes") or [])[:1])
    most = min(items) if all(items) else 0
    if lanes is not None and lanes > most:
        lanes = None
    # Elsewhere compilers choose the size for each kernel (Intel's).
    fixed = lanes is not None and lanes == _first(device, "warp_size_nv", "wavefront_width_amd")
    # A compiler for a processor that makes no vectors of one item's work makes lanes of neighbouring items: Mesa's.
    simt = Target.of_kind(kind).simt or _ask(device, "native_vector_width_float") == 1
    figures = {
        "simt": simt,
        "max_group_size": most,
        "group_multiple": lanes,
        "subgroup_size": lanes if simt else 1,
        "subgroup_shuffles": simt and fixed and has.issuperset(SUBGROUP_SHUFFLES),
        "local_memory": _ask(device, "local_mem_size"),
        "compute_units": _ask(device, "max_compute_units"),
        "max_argument_bytes": _ask(device, "max_parameter_size"),
        "atomics": _atomics(has),
        "float64": bool(_ask(device, "double_fp_config")),
        "native_float16": "cl_khr_fp16" in has or not simt,  # of a processor, its compiler has the last word
        "cache_bytes": _ask(device, "global_mem_cache_size"),
    }
    return Target.of_kind(kind, **{name: value for name, value in figures.items() if Target.accepts(name, value)})


def _ask(device: cl.Device, name: str) -> Any:
    """The answer; None where there is none, as the implementation is too old for the question, or faulty."""
    try:
        return getattr(device, name)
    except (cl.Error, AttributeError):
        return None


def _first(device: cl.Device, *names: str) -> Any:
    """The first answer that is one."""
    return next(filter(None, (_ask(device, name) for name in names)), None)


def _atomics(extensions: set[str]) -> frozenset[torch.dtype]:
    """32 bits have been OpenCL's since version 1.1."""
    dtypes = [torch.int32, torch.uint32]
    if "cl_khr_int64_base_atomics" in extensions:
        dtypes += [torch.int64, torch.uint64]
    return frozenset(dtypes)
