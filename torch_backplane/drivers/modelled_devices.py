"""Devices that behave as others would: TORCH_BACKPLANE_TARGET.

A device that runs kernels is given another one's target: its forms of kernels, its limits, its groups, and no float64
where it has none. So what a GPU would run is run, and compared with PyTorch's CPU, where there is none. The CPU does
not see the memory of such a device, as with TORCH_BACKPLANE_DISCRETE=1.
"""

from __future__ import annotations

import os
from dataclasses import replace

from torch_backplane.drivers.base import FLOAT64_DTYPES, DeviceProperties, SettingError
from torch_backplane.kernels.modelled import Modelled, read_target
from torch_backplane.kernels.target import Target

VARIABLE = "TORCH_BACKPLANE_TARGET"
# What the device itself has, or has no more of, whatever it is taken for.
_LIMITS = ("max_group_size", "local_memory", "max_argument_bytes")


def chosen() -> Modelled:
    """The target that the environment names, a file or one that ships with Backplane.

    Raises:
        SettingError: it cannot be read, or a figure is missing or absurd.
    """
    named = os.environ.get(VARIABLE, "").strip()
    try:
        return read_target(named)
    except ValueError as error:
        raise SettingError(f"{VARIABLE}={named!r}: {error}") from error


def properties_as(modelled: Modelled, properties: DeviceProperties) -> DeviceProperties:
    """What a device says of itself where it is taken for another; nothing changes of one that runs no kernels."""
    if not properties.dialect:
        return properties
    own, wanted = properties.target or Target.of_kind(properties.kind), modelled.target
    figures = {name: min(getattr(own, name), getattr(wanted, name)) for name in _LIMITS}
    for name in ("group_multiple", "subgroup_size"):
        figures[name] = min(getattr(wanted, name), figures["max_group_size"])
    float64 = own.float64 and wanted.float64
    # Of other subgroups than its own a device has none.
    shuffles = own.subgroup_shuffles and wanted.subgroup_shuffles and own.subgroup_size == figures["subgroup_size"]
    figures["subgroup_shuffles"] = shuffles
    target = replace(wanted, **figures, float64=float64, atomics=own.atomics & wanted.atomics)
    return replace(
        properties,
        name=f"{modelled.name}, modelled on {properties.name}",
        target=target,
        compute_units=wanted.compute_units,
        dtypes=[dtype for dtype in properties.dtypes if wanted.float64 or dtype not in FLOAT64_DTYPES],
    )
