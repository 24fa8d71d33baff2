"""Devices that run kernels with the target of another device: TORCH_BACKPLANE_TARGET.

The device then uses the kernel variants, limits and group sizes of that target, and has no float64 if the target has
none. This tests the kernels of a GPU on a machine without one. The memory of such a device is hidden from the CPU, as
with TORCH_BACKPLANE_DISCRETE=1.
"""

from __future__ import annotations

import os
from dataclasses import replace

from torch_backplane.drivers.base import FLOAT64_DTYPES, DeviceProperties, SettingError
from torch_backplane.kernels.modelled import Modelled, read_target
from torch_backplane.kernels.target import Target

VARIABLE = "TORCH_BACKPLANE_TARGET"
# Limits of the device itself, which the modelled target must not exceed.
_LIMITS = ("max_group_size", "local_memory", "max_argument_bytes")


def chosen() -> Modelled:
    """Return the target that TORCH_BACKPLANE_TARGET names: a file, or a target that ships with Backplane.

    Raises:
        SettingError: the target cannot be read, or a value is missing or invalid.
    """
    named = os.environ.get(VARIABLE, "").strip()
    try:
        return read_target(named)
    except ValueError as error:
        raise SettingError(f"{VARIABLE}={named!r}: {error}") from error


def properties_as(modelled: Modelled, properties: DeviceProperties) -> DeviceProperties:
    """Return the properties of a device with the modelled target. A device without kernels keeps its properties."""
    if not properties.dialect:
        return properties
    own, wanted = properties.target or Target.of_kind(properties.kind), modelled.target
    figures = {name: min(getattr(own, name), getattr(wanted, name)) for name in _LIMITS}
    for name in ("group_multiple", "subgroup_size"):
        figures[name] = min(getattr(wanted, name), figures["max_group_size"])
    float64 = own.float64 and wanted.float64
    # A device cannot shuffle within subgroups of a size other than its own.
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
